{{- define "detgate.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 30 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 30 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "detgate.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "detgate.labels" -}}
{{ include "detgate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "detgate.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "detgate.fullname" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{/* Counters in Redis, or in one process. */}}
{{- define "detgate.shared" -}}
{{- if or .Values.redis.url .Values.redis.existingSecret.name }}true{{ end }}
{{- end }}

{{- define "detgate.scheme" -}}
{{ .Values.tls.existingSecret | empty | ternary "http" "https" }}
{{- end }}

{{/* Asks a path of the gateway's. The kubelet has no certificate to show, so where one is wanted the container asks itself. */}}
{{- define "detgate.probe" -}}
{{- $root := index . 0 }}{{ $path := index . 1 }}
{{- $apart := and (gt (int $root.Values.adminPort) 0) (eq $path "/livez") }}
{{- if $root.Values.tls.clientCa }}
exec:
  command:
    - python
    - -c
    - |
      import ssl, urllib.request
      tls = ssl.create_default_context()
      tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
      tls.load_cert_chain("/etc/detgate-tls/{{ $root.Values.tls.cert }}", "/etc/detgate-tls/{{ $root.Values.tls.key }}")
      urllib.request.urlopen("https://127.0.0.1:{{ ternary (int $root.Values.adminPort) 8000 $apart }}{{ $path }}", timeout=4, context=tls)
{{- else }}
httpGet: {path: {{ $path }}, port: {{ ternary "admin" "http" $apart }}{{ if $root.Values.tls.existingSecret }}, scheme: HTTPS{{ end }}}
{{- end }}
{{- end }}

{{/* The port of a URL. */}}
{{- define "detgate.port" -}}
{{- $url := urlParse . }}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}

{{/* The replicas of a pool, by their stable names. */}}
{{- define "detgate.replicas" -}}
{{- $root := index . 0 }}{{ $pool := index . 1 }}
{{- range $pool.servers }}
- name: {{ .name | quote }}
  url: {{ .url | quote }}
  {{- if hasKey . "dpRank" }}
  dp_rank: {{ .dpRank }}
  {{- end }}
{{- end }}
{{- with $pool.statefulSet }}
{{- range $number := until (int .replicas) }}
- name: {{ printf "%s-%d" $pool.statefulSet.name $number | quote }}
  url: http://{{ $pool.statefulSet.name }}-{{ $number }}.{{ $pool.statefulSet.service }}.{{ $pool.statefulSet.namespace | default $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:{{ $pool.statefulSet.port | default 8000 }}
{{- end }}
{{- end }}
{{- with $pool.start }}
{{- $name := printf "%s-%s" (include "detgate.fullname" $root) $pool.name }}
{{- range $number := until (int $pool.start.replicas) }}
- name: {{ printf "%s-%d" $pool.name $number | quote }}
  url: http://{{ $name }}-{{ $number }}.{{ $name }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:{{ $pool.start.port | default 8000 }}
{{- end }}
{{- end }}
{{- end }}

{{/* gateway.yaml; what is secret comes by the environment. */}}
{{- define "detgate.config" -}}
{{- with .Values.settings }}{{ toYaml . }}
{{ end -}}
pools:
{{- range .Values.pools }}
- name: {{ .name | quote }}
  {{- range $key, $value := omit . "name" "servers" "statefulSet" "start" }}
  {{ $key }}: {{ toJson $value }}
  {{- end }}
  replicas:
  {{- include "detgate.replicas" (list $ .) | nindent 2 }}
{{- end }}
{{- end }}

{{/* What cannot work is said here, not by a pod that does not start. */}}
{{- define "detgate.check" -}}
{{- $shared := include "detgate.shared" . }}
{{- if and (or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled) (not $shared) }}
{{- fail "replicas: several gateways share their counters by redis; set redis.url or redis.existingSecret" }}
{{- end }}
{{- if and $shared (not .Values.settings.run) (not .Values.configSecret.name) }}
{{- fail "settings.run: a name is needed with redis, where gateways meet in a run by its name" }}
{{- end }}
{{- if not (or .Values.auth.existingSecret .Values.auth.insecure) }}
{{- fail "auth.existingSecret: names the secret with the gateway's keys; auth.insecure: true serves whoever reaches it" }}
{{- end }}
{{- if and .Values.tls.clientCa (not .Values.tls.existingSecret) }}
{{- fail "tls.clientCa: needs tls.existingSecret, which holds it" }}
{{- end }}
{{- if and .Values.networkPolicy.adminFrom (not .Values.adminPort) }}
{{- fail "networkPolicy.adminFrom: needs an adminPort" }}
{{- end }}
{{- if and (not .Values.pools) (not .Values.configSecret.name) }}
{{- fail "pools: none; list the replicas that the gateway stands before" }}
{{- end }}
{{- if and (gt (int .Values.settings.workers) 1) (not $shared) }}
{{- fail "settings.workers: several processes share their counters by redis; set redis.url or redis.existingSecret" }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas: %d is more than maxReplicas, %d" (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- end }}
{{- range .Values.env }}
{{- if and (eq .name "DETGATE_TIMEOUTS__DRAIN") (kindIs "invalid" $.Values.drainSeconds) }}
{{- fail "drainSeconds: is needed beside DETGATE_TIMEOUTS__DRAIN in env, so that pods are given longer" }}
{{- end }}
{{- end }}
{{- $pools := dict }}
{{- $replicas := dict }}
{{- range .Values.pools }}
{{- if ne 1 (len (keys (pick . "servers" "statefulSet" "start"))) }}
{{- fail (printf "pools: %s needs one of servers, statefulSet and start" .name) }}
{{- end }}
{{- if hasKey $pools .name }}
{{- fail (printf "pools: two have the name %s" .name) }}
{{- end }}
{{- $_ := set $pools .name true }}
{{- $pool := .name }}
{{- range fromYamlArray (include "detgate.replicas" (list $ .)) }}
{{- if hasKey $replicas .name }}
{{- fail (printf "pools: two replicas have the name %s, one of pool %s and one of pool %s" .name (get $replicas .name) $pool) }}
{{- end }}
{{- $_ := set $replicas .name $pool }}
{{- end }}
{{- include "detgate.checkPool" (list $ .) }}
{{- end }}
{{- end }}

{{/* What a pool's own settings contradict, as `detgate config` has it. */}}
{{- define "detgate.checkPool" -}}
{{- $settings := (index . 0).Values.settings }}
{{- $pool := index . 1 }}
{{- $strict := eq ($settings.profile | default "balanced") "strict" }}
{{- $lane := $pool.lane | default dict }}
{{- $reward := eq ($pool.role | default "generate") "reward" }}
{{- $scope := $lane.scope | default (ternary "replica" "none" $reward) }}
{{- $limit := $lane.limit | default (ternary 1 0 (or (eq $scope "group") (and $reward (ne $scope "none")))) | int }}
{{- if and (eq $scope "none") $limit }}
{{- fail (printf "pools: lane.limit of %s bounds nothing while scope is none" $pool.name) }}
{{- end }}
{{- if and (ne $scope "none") (not $limit) }}
{{- fail (printf "pools: lane.limit of %s is needed with scope %s" $pool.name $scope) }}
{{- end }}
{{- if and (ne $scope "group") (eq ($lane.members | default "present") "episode") }}
{{- fail (printf "pools: lane.members: episode of %s needs scope group" $pool.name) }}
{{- end }}
{{- if and (has $scope (list "session" "group")) (not (dig "sessions" "required" false $settings)) }}
{{- fail (printf "pools: lane.scope: %s of %s needs settings.sessions.required: true" $scope $pool.name) }}
{{- end }}
{{- if and $strict (eq $pool.engine "openai") }}
{{- fail (printf "pools: engine openai of %s promises nothing that profile strict could hold it to" $pool.name) }}
{{- end }}
{{- if and $strict $reward (not (and (has $scope (list "replica" "pool")) (eq $limit 1))) }}
{{- fail (printf "pools: lane of %s lets requests share a batch, which changes scores; profile strict refuses" $pool.name) }}
{{- end }}
{{- end }}
