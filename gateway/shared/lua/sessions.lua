-- The sessions of one run that were created, and what became of them: one order of events for all gateways.
--
-- ARGV     operation, a name for this memory if it has none, the number of the last event that the caller knows,
--          milliseconds for which a run is kept, most sessions that are open, then what the operation takes
--
-- All of it ends with the run. Gives over where that has ended; else the memory's name, the number of the last event, the events since the caller's (number, text …) or nothing
-- where they are kept no more, and then what the operation gives.
--
-- sessions:about    hash: memory, number of the last event, open sessions
-- sessions:events   stream: number-0 → text
-- sessions:all      hash: session → ordinal, digest of its key, group, what it was created with as JSON; packed
-- sessions:ended    hash: session → why it failed, as JSON; null: it did not
-- sessions:order    list: sessions as they ended. Only so many are remembered
-- sessions:keys     hash: digest of a key → session
-- sessions:groups   hash: group → its members that are remembered
-- sessions:ordinals hash: identity → the ordinal that its next session has at least
-- sessions:idle     sorted set: open session → when it was last used
-- sessions:trouble  hash: session → why its last request was not delivered, as JSON
-- session:{id}:recent   hash: number → its delivered requests, the last, as JSON; r:request id, a:answer id → number
-- session:{id}:rewards  hash: identity, NUL, index → reward
-- session:{id}:held, group:{id}:held  hash: pool → the version of the weights that was met first

local operation, memory, last = ARGV[1], ARGV[2], tonumber(ARGV[3])
local kept, limit = tonumber(ARGV[4]), tonumber(ARGV[5])
local FIRST = 6
local EVENTS, RECENT = 10000, 64
local json = cjson.encode
local root, now = PREFIX, now_ms()

if is_over() then
    return { 'over' }
end

local ABOUT, STREAM = root .. 'sessions:about', root .. 'sessions:events'
local ALL, ENDED, ORDER = root .. 'sessions:all', root .. 'sessions:ended', root .. 'sessions:order'
local HOLDERS, GROUPS, ORDINALS = root .. 'sessions:keys', root .. 'sessions:groups', root .. 'sessions:ordinals'
local IDLE, TROUBLE = root .. 'sessions:idle', root .. 'sessions:trouble'

-- Before anybody takes part in a run it has no end: what is kept of it then stays as long as somebody asks.
local known_end = call('HGET', H, '@until')
local ends = known_end or written(now + kept)

if call('HSETNX', ABOUT, 'memory', memory) == 1 or (not known_end and call('PTTL', ABOUT) < kept / 2) then
    call('PEXPIREAT', ABOUT, ends)
end

local function detail(session, part)
    return root .. 'session:' .. session .. ':' .. part
end

local function held_by(session, group)
    return group == '' and detail(session, 'held') or root .. 'group:' .. group .. ':held'
end

local function tell(text)
    local number = call('HINCRBY', ABOUT, 'number', 1)
    call('XADD', STREAM, 'MAXLEN', '~', EVENTS, number .. '-0', 'e', text)
    call('PUBLISH', root .. 'sessions', number .. ' ' .. text)
end

local function numbered(name, ordinal)
    return ordinal > 0 and name .. '-' .. string.format('%d', ordinal) or name
end

local function keep()
    for _, key in ipairs({ ABOUT, STREAM, ALL, ENDED, ORDER, HOLDERS, GROUPS, ORDINALS, IDLE, TROUBLE }) do
        call('PEXPIREAT', key, ends)
    end
end

local function forget(session)
    local created = call('HGET', ALL, session)
    call('HDEL', ENDED, session)
    call('DEL', detail(session, 'recent'), detail(session, 'rewards'), detail(session, 'held'))
    if not created then
        return
    end
    local _, key, group = cmsgpack.unpack(created)
    call('HDEL', ALL, session)
    if call('HGET', HOLDERS, key) == session then
        call('HDEL', HOLDERS, key)
    end
    if group ~= '' and call('HINCRBY', GROUPS, group, -1) <= 0 then
        call('HDEL', GROUPS, group)
        call('DEL', held_by(session, group))
    end
end

local function finish(session, why)
    call('HSET', ENDED, session, why)
    call('HDEL', TROUBLE, session)
    call('ZREM', IDLE, session)
    if call('HEXISTS', ALL, session) == 1 then
        call('HINCRBY', ABOUT, 'open', -1)
    end
    tell('{"event":"ended","session":' .. json(session) .. ',"why":' .. why .. '}')
    call('RPUSH', ORDER, session)
    if call('LLEN', ORDER) > limit then
        forget(call('LPOP', ORDER))
    end
end

local function opened()
    return tonumber(call('HGET', ABOUT, 'open') or '0')
end

-- Sessions from ARGV, each as its identity, the digest of its key, and what it is created with.
local function create(ordinal, group, at, size)
    local group_id, told = group ~= '' and numbered(group, ordinal) or '', {}
    for each = at, at + 3 * size - 1, 3 do
        local identity, key, about = ARGV[each], ARGV[each + 1], ARGV[each + 2]
        local session = numbered(identity, ordinal)
        call('HSET', ALL, session, cmsgpack.pack(ordinal, key, group_id, about))
        call('HSET', HOLDERS, key, session)
        call('ZADD', IDLE, now, session)
        if ordinal >= tonumber(call('HGET', ORDINALS, identity) or '0') then
            call('HSET', ORDINALS, identity, string.format('%d', ordinal + 1))
        end
        told[#told + 1] = '{"key":"' .. key .. '","about":' .. about .. '}'
    end
    if group_id ~= '' then
        call('HSET', GROUPS, group_id, size)
    end
    call('HINCRBY', ABOUT, 'open', size)
    tell(string.format('{"event":"created","ordinal":%d,"sessions":[', ordinal) .. table.concat(told, ',') .. ']}')
    keep()
end

local operations = {}

-- size, group's identity or nothing, digest of a key that the first is to have or nothing, how many ordinals may be
-- chosen from, the first of them, then the sessions, then for each ordinal and session its name among the indices.
-- Gives created, ordinal, whether the key was taken; full, open sessions; active, session; again, first ordinal.
function operations.create()
    local size, group, wanted = tonumber(ARGV[FIRST]), ARGV[FIRST + 1], ARGV[FIRST + 2]
    local choice, first = tonumber(ARGV[FIRST + 3]), tonumber(ARGV[FIRST + 4])
    local sessions = FIRST + 5
    local names = sessions + 3 * size
    if opened() + size > limit then
        return { 'full', opened() }
    end
    local holder = wanted ~= '' and call('HGET', HOLDERS, wanted)
    if holder and call('HEXISTS', ENDED, holder) == 0 then
        return { 'active', holder }
    end
    local least = 0
    for each = sessions, names - 1, 3 do
        least = math.max(least, tonumber(call('HGET', ORDINALS, ARGV[each]) or '0'))
    end
    for ordinal = math.max(least, first), first + choice - 1 do
        local free = group == '' or call('HEXISTS', GROUPS, numbered(group, ordinal)) == 0
        for member = 0, size - 1 do
            local session = numbered(ARGV[sessions + 3 * member], ordinal)
            local name = ARGV[names + (ordinal - first) * size + member]
            if call('HEXISTS', ALL, session) == 1 or call('HEXISTS', ENDED, session) == 1
                or call('HEXISTS', H, name) == 1 then
                free = false
            end
        end
        if free then
            if holder then
                ARGV[sessions + 1] = wanted
            end
            if known_end then
                prolong(known_end, kept)
                ends = call('HGET', H, '@until')
            end
            create(ordinal, group, sessions, size)
            return { 'created', ordinal, holder and 1 or 0 }
        end
    end
    return { 'again', math.max(least, first + choice) }
end

-- ordinal, group's identity or nothing, size, the sessions, then for each why it ended, or nothing: told again to a
-- memory that may lack them
function operations.retell()
    local ordinal, group, size = tonumber(ARGV[FIRST]), ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2])
    local sessions = FIRST + 3
    if call('HEXISTS', ALL, numbered(ARGV[sessions], ordinal)) == 0 then
        create(ordinal, group, sessions, size)
    end
    for member = 0, size - 1 do
        local why, session = ARGV[sessions + 3 * size + member], numbered(ARGV[sessions + 3 * member], ordinal)
        if why ~= '' and call('HEXISTS', ENDED, session) == 0 then
            finish(session, why)
        end
    end
    keep()
    return {}
end

-- session, why as JSON or nothing: then it failed only if its last request was not delivered; how that is said before
-- what happened to it. Gives why.
function operations.finish()
    local session, why = ARGV[FIRST], ARGV[FIRST + 1]
    local ended = call('HGET', ENDED, session)
    if ended then
        return { 'ended', ended }
    end
    local trouble = call('HGET', TROUBLE, session)
    if why == '' then
        why = trouble and '"' .. ARGV[FIRST + 2] .. string.sub(trouble, 2) or 'null'
    end
    finish(session, why)
    keep()
    return { 'done', why }
end

-- session, pool, version: it has met these weights. What it or its group has met first, holds.
function operations.hold()
    local session, pool, version = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
    local created = call('HGET', ALL, session)
    if not created then
        return {}
    end
    local _, _, group = cmsgpack.unpack(created)
    local held = held_by(session, group)
    if call('HSETNX', held, pool, version) == 1 then
        local what = '"pool":' .. json(pool) .. ',"version":' .. json(version)
        tell('{"event":"held","session":' .. json(session) .. ',' .. what .. '}')
    end
    call('PEXPIREAT', held, ends)
    return {}
end

-- The answer's id of a request that is remembered leads to it no more.
local function unlink_answer(recent, number)
    local known = call('HGET', recent, number)
    local answer = known and cjson.decode(known)[4] or ''
    if answer ~= '' and call('HGET', recent, 'a:' .. answer) == number then
        call('HDEL', recent, 'a:' .. answer)
    end
    return known
end

-- session, trouble as JSON or nothing, then of a delivered request that samples: identity, index, request id, answer id
function operations.left()
    local session, trouble = ARGV[FIRST], ARGV[FIRST + 1]
    if call('HEXISTS', ALL, session) == 0 then
        return {}
    end
    if trouble ~= '' then
        call('HSET', TROUBLE, session, trouble)
        call('PEXPIREAT', TROUBLE, ends)
    else
        call('HDEL', TROUBLE, session)
    end
    if #ARGV < FIRST + 2 then
        return {}
    end
    local identity, index, request, answer = ARGV[FIRST + 2], ARGV[FIRST + 3], ARGV[FIRST + 4], ARGV[FIRST + 5]
    local recent = detail(session, 'recent')
    local number = call('HGET', recent, 'r:' .. request)
    if not number then
        number = call('HINCRBY', recent, 'last', 1)
        local oldest = string.format('%d', number - RECENT)
        local gone = unlink_answer(recent, oldest)
        if gone then
            call('HDEL', recent, oldest, 'r:' .. cjson.decode(gone)[3])
        end
        call('HSET', recent, 'r:' .. request, string.format('%d', number))
    end
    number = string.format('%d', number)
    unlink_answer(recent, number)
    local text = '[' .. json(identity) .. ',' .. index .. ',' .. json(request) .. ',' .. json(answer) .. ']'
    call('HSET', recent, number, text, 'latest', number)
    if answer ~= '' then
        call('HSET', recent, 'a:' .. answer, number)
    end
    call('PEXPIREAT', recent, ends)
    return {}
end

-- session. Gives trouble as JSON, how many of its requests were delivered, then its rewards.
function operations.look()
    local session = ARGV[FIRST]
    return {
        call('HGET', TROUBLE, session) or 'null',
        tonumber(call('HGET', detail(session, 'recent'), 'last') or '0'),
        call('HVALS', detail(session, 'rewards')),
    }
end

-- The largest number, and by how much all are made smaller before they are added, so that no sum in between is beyond it.
local SCALE = 2 ^ -100
local LARGEST = (2 - 2 ^ -52) * 2 ^ 1023 * SCALE

-- Whether numbers and one more, which is to scale, have a sum above 0 (1) or below (-1). It is not rounded: every part that
-- an addition loses is kept as a number of its own.
local function sign(numbers, last)
    local parts = {}
    for each = 1, #numbers + 1 do
        local sum, kept = each > #numbers and last or numbers[each] * SCALE, {}
        for _, part in ipairs(parts) do
            local large, small = sum, part
            if math.abs(sum) < math.abs(part) then
                large, small = part, sum
            end
            sum = large + small
            local lost = small - (sum - large)
            if lost ~= 0 then
                kept[#kept + 1] = lost
            end
        end
        if sum ~= 0 then
            kept[#kept + 1] = sum
        end
        parts = kept
    end
    local whole = parts[#parts] or 0
    return whole > 0 and 1 or whole < 0 and -1 or 0
end

local function beyond(numbers)
    local most = 0
    for _, each in ipairs(numbers) do
        most = most + math.abs(each) * SCALE
    end
    return most > LARGEST / 2 and (sign(numbers, -LARGEST) > 0 or sign(numbers, LARGEST) < 0)
end

-- session, reward, a request by its own or its answer's id, or nothing: the last one; or nothing, identity and index.
-- Gives ended; unknown; large: the sum would be beyond the largest number; or done, identity, index, its reward before or
-- nothing, then its session's rewards.
function operations.reward()
    local session, reward, name = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
    if call('HEXISTS', ENDED, session) == 1 then
        return { 'ended' }
    end
    local identity, index = ARGV[FIRST + 3], ARGV[FIRST + 4]
    if not identity then
        local recent = detail(session, 'recent')
        local number
        if name == '' then
            number = call('HGET', recent, 'latest')
        else
            number = call('HGET', recent, 'r:' .. name) or call('HGET', recent, 'a:' .. name)
        end
        if not number then
            return { 'unknown' }
        end
        local known = call('HGET', recent, number)
        identity, index = cjson.decode(known)[1], string.match(known, '^%[.-",(%d+),"')
    end
    local rewards, place = detail(session, 'rewards'), identity .. '\0' .. index
    local before, given, numbers = '', call('HGETALL', rewards), { tonumber(reward) }
    for each = 1, #given, 2 do
        if given[each] == place then
            before = given[each + 1]
        else
            numbers[#numbers + 1] = tonumber(given[each + 1])
        end
    end
    if beyond(numbers) then
        return { 'large' }
    end
    call('HSET', rewards, place, reward)
    call('PEXPIREAT', rewards, ends)
    call('ZADD', IDLE, 'XX', now, session)
    return { 'done', identity, index, before, call('HVALS', rewards) }
end

-- milliseconds after which the idle end, why as JSON, how many end at most, then sessions that were used just now. Gives
-- those that have ended.
function operations.sweep()
    local idle, why, most = tonumber(ARGV[FIRST]), ARGV[FIRST + 1], tonumber(ARGV[FIRST + 2])
    for each = FIRST + 3, #ARGV do
        call('ZADD', IDLE, 'XX', now, ARGV[each])
    end
    local due = most > 0 and call('ZRANGEBYSCORE', IDLE, '-inf', now - idle, 'LIMIT', 0, most) or {}
    for _, session in ipairs(due) do
        finish(session, why)
    end
    if #due > 0 then
        keep()
    end
    return due
end

-- a cursor. Gives the next, then for each session its ordinal, key, what it was created with, why it ended, and to what
-- weights it is held.
function operations.all()
    local found = call('HSCAN', ALL, ARGV[FIRST], 'COUNT', 500)
    local told = { found[1] }
    for each = 1, #found[2], 2 do
        local session = found[2][each]
        local ordinal, key, group, about = cmsgpack.unpack(found[2][each + 1])
        local held = call('HGETALL', held_by(session, group))
        told[#told + 1] = { ordinal, key, about, call('HGET', ENDED, session) or '', held }
    end
    return told
end

-- Whatever there is to hear.
function operations.since()
    return {}
end

local result = operations[operation]()
local known = call('HMGET', ABOUT, 'memory', 'number')
local number = tonumber(known[2] or '0')
local events = {}
if last >= 0 and last < number then
    local entries = call('XRANGE', STREAM, string.format('%d-0', last + 1), '+', 'COUNT', 1000)
    if #entries == 0 or entries[1][1] ~= string.format('%d-0', last + 1) then
        events = false
    else
        for _, entry in ipairs(entries) do
            events[#events + 1] = { tonumber(string.match(entry[1], '^%d+')), entry[2][2] }
        end
    end
end
return { known[1], number, events, result }
