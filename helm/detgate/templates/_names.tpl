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
      urllib.request.urlopen("https://127.0.0.1:8000{{ $path }}", timeout=4, context=tls)
{{- else }}
httpGet: {path: {{ $path }}, port: http{{ if $root.Values.tls.existingSecret }}, scheme: HTTPS{{ end }}}
{{- end }}
{{- end }}

{{/* The replicas of a pool, by their stable names. */}}
{{- define "detgate.replicas" -}}
{{- $root := index . 0 }}{{ $pool := index . 1 }}
{{- range $pool.servers }}
- name: {{ .name }}
  url: {{ .url | quote }}
  {{- if hasKey . "dpRank" }}
  dp_rank: {{ .dpRank }}
  {{- end }}
{{- end }}
{{- with $pool.statefulSet }}
{{- range $number := until (int .replicas) }}
- name: {{ $pool.statefulSet.name }}-{{ $number }}
  url: http://{{ $pool.statefulSet.name }}-{{ $number }}.{{ $pool.statefulSet.service }}.{{ $pool.statefulSet.namespace | default $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:{{ $pool.statefulSet.port | default 8000 }}
{{- end }}
{{- end }}
{{- with $pool.start }}
{{- $name := printf "%s-%s" (include "detgate.fullname" $root) $pool.name }}
{{- range $number := until (int $pool.start.replicas) }}
- name: {{ $pool.name }}-{{ $number }}
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
- name: {{ .name }}
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
{{- range .Values.pools }}
{{- if ne 1 (len (keys (pick . "servers" "statefulSet" "start"))) }}
{{- fail (printf "pools: %s needs one of servers, statefulSet and start" .name) }}
{{- end }}
{{- end }}
{{- end }}
