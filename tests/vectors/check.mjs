// Recomputes every vector of this folder from the written definitions, without any of the gateway's code.
//
//   node tests/vectors/check.mjs [folder]
//
// Node 20 and no packages. Exits with 1 and one line for each vector that differs.

import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const folder = process.argv[2] ?? dirname(fileURLToPath(import.meta.url));

// Framing, hashes, seeds: gateway/core/seeds.py and gateway/schemes

const utf8 = (text) => Buffer.from(text, "utf8");

function framed(...parts) {
  return Buffer.concat(
    parts.flatMap((part) => {
      const length = Buffer.alloc(8);
      length.writeBigUInt64BE(BigInt(part.length));
      return [length, part];
    }),
  );
}

const hashed = (name, ...parts) => createHash(name).update(Buffer.concat(parts)).digest();

function derived(...parts) {
  const x = hashed("blake2b512", framed(...parts.map((part) => utf8(String(part))))).readBigUInt64BE();
  return 1n + (x % (2n ** 31n - 1n));
}

const schemes = {
  v1: ({ master, identity, index }) => derived("detgate-seed-v1", BigInt(master), identity, index),
  areal: ({ identity, index }) =>
    BigInt(hashed("sha256", utf8(`${identity}:${index}`)).readUInt32BE()) & 0x7fffffffn,
  offset: ({ master, index, member }) => {
    const sum = BigInt(master) + BigInt(member ?? 0) + 1000003n * BigInt(index);
    return ((sum % 2n ** 31n) + 2n ** 31n) % 2n ** 31n;
  },
};

function samples({ seed, n }) {
  const found = [BigInt(seed)];
  const taken = new Set([BigInt(seed) % 2n ** 32n]);
  for (let sample = 1; sample < n; sample++) {
    let tries = 0;
    let next = derived("detgate-sample-v1", seed, sample, tries);
    while (taken.has(next)) next = derived("detgate-sample-v1", seed, sample, ++tries);
    taken.add(next);
    found.push(next);
  }
  return found.map(String);
}

const segment = ({ seed, sample, number }) => String(derived("detgate-segment-v1", seed, sample, number));

// Ids: gateway/core/ids.py

function percent(text) {
  let encoded = "";
  for (const byte of utf8(text)) {
    const character = String.fromCharCode(byte);
    encoded += /[A-Za-z0-9\-._:/]/.test(character)
      ? character
      : "%" + byte.toString(16).toUpperCase().padStart(2, "0");
  }
  return encoded;
}

function requestId({ identity, index, ordinal }) {
  const whole = `${percent(identity)}${ordinal > 0 ? `~${ordinal}` : ""}:${index}`;
  if (whole.length <= 200) return whole;
  return `${whole.slice(0, 100)}~${hashed("sha256", utf8(whole)).toString("hex").slice(0, 16)}`;
}

const engineId = (vector) =>
  `${requestId(vector)}.${vector.sample}${vector.live > 0 ? `-${vector.live}` : ""}!`;

// The score of a replica for a key: gateway/core/routing.py

const score = ({ key, name }) =>
  String(xxh64(utf8(name), hashed("blake2b512", framed(utf8(key))).readBigUInt64BE()));

// XXH64, as its specification has it (xxHash 0.1.1, "XXH64 Algorithm Description")
function xxh64(data, seed) {
  const [p1, p2, p3, p4, p5] = [
    0x9e3779b185ebca87n,
    0xc2b2ae3d27d4eb4fn,
    0x165667b19e3779f9n,
    0x85ebca77c2b2ae63n,
    0x27d4eb2f165667c5n,
  ];
  const u64 = (x) => BigInt.asUintN(64, x);
  const rotated = (x, bits) => u64(x << bits) | (x >> (64n - bits));
  const round = (lane, value) => u64(rotated(u64(lane + value * p2), 31n) * p1);
  const merged = (sum, lane) => u64((sum ^ round(0n, lane)) * p1 + p4);

  let at = 0;
  let sum = u64(seed + p5);
  if (data.length >= 32) {
    const lanes = [seed + p1 + p2, seed + p2, seed, seed - p1].map(u64);
    for (; at + 32 <= data.length; at += 32) {
      for (const i of lanes.keys()) lanes[i] = round(lanes[i], data.readBigUInt64LE(at + 8 * i));
    }
    sum = u64([1n, 7n, 12n, 18n].reduce((total, bits, i) => total + rotated(lanes[i], bits), 0n));
    sum = lanes.reduce(merged, sum);
  }
  sum = u64(sum + BigInt(data.length));
  for (; at + 8 <= data.length; at += 8) {
    sum = u64(rotated(sum ^ round(0n, data.readBigUInt64LE(at)), 27n) * p1 + p4);
  }
  if (at + 4 <= data.length) {
    sum = u64(rotated(sum ^ u64(BigInt(data.readUInt32LE(at)) * p1), 23n) * p2 + p3);
    at += 4;
  }
  for (; at < data.length; at++) {
    sum = u64(rotated(sum ^ u64(BigInt(data[at]) * p5), 11n) * p1);
  }
  sum = u64((sum ^ (sum >> 33n)) * p2);
  sum = u64((sum ^ (sum >> 29n)) * p3);
  return sum ^ (sum >> 32n);
}

// The canonical form: gateway/core/canonical.py

const verbatim = (text) => ({ verbatim: text });
const isObject = (value) => value instanceof Map;

// A JSON reader of its own, for JSON.parse rounds numbers and knows no NaN. Objects become maps.
function parsed(text) {
  const token = /[ \t\n\r]*("(?:[^"\\]|\\.)*"|[[\]{},:]|[^[\]{},:" \t\n\r]+)/y;
  const next = () => token.exec(text)[1];

  function value(first) {
    if (first === "[") {
      const list = [];
      for (let item = next(); item !== "]"; item = next()) if (item !== ",") list.push(value(item));
      return list;
    }
    if (first === "{") {
      const object = new Map();
      for (let key = next(); key !== "}"; key = next()) {
        if (key === ",") continue;
        next();
        object.set(JSON.parse(key), value(next()));
      }
      return object;
    }
    if (/^["tfn]/.test(first)) return JSON.parse(first);
    return verbatim(number(first));
  }

  return value(next());
}

function number(text) {
  const match = /^(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?$/.exec(text);
  if (match === null) return text;
  const [, sign, whole, fraction = "", exponent = "0"] = match;
  let coefficient = BigInt(whole + fraction);
  if (coefficient === 0n) return "0";
  let power = BigInt(exponent) - BigInt(fraction.length);
  while (coefficient % 10n === 0n) {
    coefficient /= 10n;
    power += 1n;
  }
  const digits = coefficient.toString();
  if (power >= 0n && BigInt(digits.length) + power <= 30n) return sign + digits + "0".repeat(Number(power));
  return `${sign}${digits}e${power}`;
}

const unsampled = new Set(
  ("stream stream_options rid request_id priority user metadata safety_identifier prompt_cache_key " +
    "cache_salt").split(" "),
);

function withoutIds(body) {
  const ids = new Map();
  const replace = (holder, name) => {
    if (!isObject(holder) || typeof holder.get(name) !== "string") return;
    const id = holder.get(name);
    if (!ids.has(id)) ids.set(id, ids.size);
    holder.set(name, verbatim(`#${ids.get(id)}`));
  };
  const list = (holder, name) => (Array.isArray(holder.get(name)) ? holder.get(name) : []);
  const element = (turn, names) => {
    if (!isObject(turn)) return;
    for (const call of list(turn, "tool_calls")) replace(call, "id");
    replace(turn, "tool_call_id");
    for (const part of list(turn, "content")) {
      if (!isObject(part)) continue;
      if (String(part.get("type")).endsWith("tool_use")) replace(part, "id");
      replace(part, "tool_use_id");
    }
    for (const name of names) replace(turn, name);
  };
  for (const turn of list(body, "messages")) {
    for (const inner of Array.isArray(turn) ? turn : [turn]) element(inner, []);
  }
  for (const item of list(body, "input")) element(item, ["call_id", "id"]);
  replace(body, "previous_response_id");
}

function byCodePoint([left], [right]) {
  const [a, b] = [left, right].map((key) => [...key].map((character) => character.codePointAt(0)));
  const at = a.findIndex((code, i) => code !== b[i]);
  return at < 0 ? a.length - b.length : at >= b.length ? 1 : a[at] - b[at];
}

function written(value) {
  if (Array.isArray(value)) return `[${value.map(written).join()}]`;
  if (isObject(value)) {
    const members = [...value].sort(byCodePoint);
    return `{${members.map(([key, inner]) => `${JSON.stringify(key)}:${written(inner)}`).join()}}`;
  }
  return value?.verbatim ?? JSON.stringify(value);
}

function form({ body }) {
  const value = parsed(body.replace(/^\ufeff/, ""));
  for (const name of unsampled) value.delete(name);
  withoutIds(value);
  return written(value);
}

function content(vector) {
  const head = framed(utf8("detgate-content-v1"), utf8(vector.route));
  return hashed("sha256", head, utf8(form(vector))).toString("hex").slice(0, 32);
}

// What each file claims, and how it is recomputed

const claims = {
  "samples.json": { seeds: samples },
  "segments.json": { segment },
  "ids.json": { request_id: requestId, engine_id: engineId },
  "content.json": { form, digest: content },
  "routing.json": { score },
};

let checked = 0;
let wrong = 0;

function check(file, claim) {
  for (const [i, vector] of JSON.parse(readFileSync(join(folder, file), "utf8")).entries()) {
    for (const [name, compute] of Object.entries(claim)) {
      const [expected, found] = [vector[name], compute(vector)].map((value) => JSON.stringify(value));
      checked += 1;
      if (expected === found) continue;
      wrong += 1;
      console.error(`${file}[${i}].${name}: ${expected} is ${found} here`);
    }
  }
}

for (const file of readdirSync(folder).filter((name) => name.endsWith(".json"))) {
  if (!(file in claims)) throw new Error(`${file}: this script does not know how to check it`);
  check(file, claims[file]);
}
for (const file of readdirSync(join(folder, "schemes"))) {
  const scheme = schemes[basename(file, ".json")];
  if (scheme === undefined) throw new Error(`${file}: this script does not know the scheme`);
  check(join("schemes", file), { seed: (vector) => Number(scheme(vector)) });
}
console.log(`${checked} values checked, ${wrong} wrong`);
process.exitCode = wrong > 0 ? 1 : 0;
