-- The rule of gateway/core/indexing.py, each part of a counter's state a field of its own. Stands before every script.
--
-- KEYS[1] is the state of a run, KEYS[2] its released indices, KEYS[3] the live claims of the gateway that calls.
-- Fields of the state, where `scope` and `session` are digests of 16 bytes:
--   @server @epoch @phase …   the run and its epoch (take_part.lua)
--   @g<gateway>               as what it takes part: "connection:epoch"
--   @q<gateway>               the number of its last call
--   <scope>                   next number, kind, how often it raced, different bytes in flight, somebody waits,
--                             one that was to be drawn waits for those in flight, or did
--   <scope>i<index>           a live index: claims, answers that have not ended, used, drawn, when drawn, bytes
--   <scope>a<bytes>           asked for with these bytes: the index, -1 for many, -2 or -3 for none yet (indexing.py),
--                             latest repeat, live indices
--   <scope>d<bytes>           how many indices in flight were drawn with these bytes
--   <scope>o<index>           whose bytes it has, where many asked with the same
--   <scope>r<index>           it raced
--   <scope>b<index>           bound to a key or number: keyed, used, "+" and the content, or "-"
--   <scope>h<index>           an index that others reported to be beyond, and nobody yet (report.lua)
--   <session>                 the last epoch in which it was found whole, or F
--   <session>t                an index of it was found to be given twice
--   <session>g<gateway>       that gateway served it
--   <session>k<key>           what an idempotency key is bound to: scope, index, content
-- A live claim, by its token: scope, "o" or "e" (its answer has ended), index, "|", session and identity as JSON.
local H, R, C = KEYS[1], KEYS[2], KEYS[3]
local call = redis.call
local PREFIX = string.sub(H, 1, -6)
local MANY, NONE, LATE = -1, -2, -3

local function process()
    return string.match(call('INFO', 'server'), 'run_id:(%x+)')
end

-- Whether this server is still the one that the state was kept by, and has kept it all: the same process, and never
-- another's replica since. Without a former history its replication id may change by itself, as when a first replica
-- comes.
local function is_server(kept)
    local now, former = string.match(call('INFO', 'replication'), 'master_replid:(%x+).-master_replid2:(%x+)')
    if now == kept then
        return true
    end
    if not kept or string.find(former, '[^0]') or call('HGET', H, '@process') ~= process() then
        return false
    end
    call('HSET', H, '@server', now)
    return true
end

-- Whether the server has thrown away what was released, of which an empty member is always there. Then the run is forgotten
-- whole, and is told again: part of it would be taken for all.
local function is_torn()
    if call('ZSCORE', R, '') then
        return false
    end
    call('DEL', H)
    return true
end

local function now_ms()
    local time = call('TIME')
    return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- All keys of the run end at once; a word that it is over stays for longer.
local function keep_until(time, retention)
    local at = string.format('%.0f', time)
    call('HSET', H, '@until', at)
    call('PEXPIREAT', H, at)
    call('PEXPIREAT', R, at)
    for _, key in ipairs({
        'beats', 'gone', 'ends', 'missing', 'awaited', 'changes', 'changes:list', 'changes:heard', 'changes:removed',
        'sessions:about', 'sessions:events', 'sessions:all', 'sessions:ended', 'sessions:order', 'sessions:keys',
        'sessions:groups', 'sessions:ordinals', 'sessions:idle', 'sessions:trouble'
    }) do
        call('PEXPIREAT', PREFIX .. key, at)
    end
    for _, gateway in ipairs(call('ZRANGE', PREFIX .. 'beats', 0, -1)) do
        call('PEXPIREAT', PREFIX .. 'claims:' .. gateway, at)
    end
    call('SET', PREFIX .. 'over', at, 'PX', string.format('%.0f', 13 * retention))
end

local function number_of(text)
    return tonumber(text) or 0
end

-- The run is used: it ends `retention` from now, or a little before. `ends`: when it does so far.
local function prolong(ends, retention)
    local now = now_ms()
    if number_of(ends) < now + retention - math.min(retention / 100, 3600000) then
        keep_until(now + retention, retention)
    end
end

-- Whether the run was idle for as long as runs are kept.
local function is_over()
    local over = call('EXISTS', H) == 0 and call('GET', PREFIX .. 'over')
    return over and tonumber(over) <= now_ms()
end

-- --- one counter
local scope, head, changed

local function read_head(text)
    if not text then
        return {next = 0, kind = '', races = 0, kinds = 0, waits = 0, contended = 0}
    end
    local next, kind, races, kinds, waits, contended = string.match(
        text, '^(%d+),(%a?),(%d+),(%d+),(%d+),(%d+)$'
    )
    return {
        next = tonumber(next), kind = kind, races = tonumber(races), kinds = tonumber(kinds), waits = tonumber(waits),
        contended = tonumber(contended)
    }
end

local function open(name, text)
    scope, head, changed = name, read_head(text), {}
end

local function put(field, value)
    changed[#changed + 1] = field
    changed[#changed + 1] = value
end

local function written(n)
    return string.format('%.0f', n)
end

local function close()
    put(scope, table.concat({
        written(head.next), head.kind, head.races, head.kinds, head.waits, head.contended
    }, ','))
    call('HSET', H, unpack(changed))
end

local function read_live(index)
    local text = call('HGET', H, scope .. 'i' .. written(index))
    if not text then
        return nil
    end
    local claims, open, used, drawn, since = struct.unpack('>I4I4BBI4', text)
    return {
        claims = claims, open = open, used = used == 1, drawn = drawn == 1, since = since, raw = string.sub(text, 15)
    }
end

local function write_live(index, live)
    call('HSET', H, scope .. 'i' .. written(index), struct.pack(
        '>I4I4BBI4', live.claims, live.open, live.used and 1 or 0, live.drawn and 1 or 0, live.since
    ) .. live.raw)
end

local function hold(index, raw, used)
    local live = read_live(index) or {claims = 0, open = 0, used = used, drawn = false, since = 0, raw = raw}
    live.claims = live.claims + 1
    live.open = live.open + 1
    return live
end

local function raced(index, live)
    if live and live.drawn and live.since < head.races then
        return true
    end
    return call('HEXISTS', H, scope .. 'r' .. written(index)) == 1
end

local function read_asked(raw)
    local text = call('HGET', H, scope .. 'a' .. raw)
    if not text then
        return nil
    end
    local index, latest, live = string.match(text, '^(%-?%d+),(%d+),(%d+)$')
    return {index = tonumber(index), latest = tonumber(latest), live = tonumber(live)}
end

local function write_asked(raw, asked)
    put(scope .. 'a' .. raw, written(asked.index) .. ',' .. written(asked.latest) .. ',' .. asked.live)
end

local function own(index, raw)
    if index >= 0 then
        put(scope .. 'o' .. written(index), raw)
    end
end

-- Who waits for a rival has asked, and was noted then, with no index yet.
local function noted(asked, raw, index, latest, waited)
    if not asked then
        return {index = index, latest = latest, live = 0}
    end
    local before = asked.index
    if (latest <= asked.latest and not waited) or (index >= 0 and asked.index >= 0 and asked.index ~= index) then
        asked.index = MANY
    else
        asked.latest = math.max(asked.latest, latest)
        if index >= 0 and asked.index ~= MANY then
            asked.index = index
        end
    end
    if asked.index == MANY then
        own(before, raw)
        own(index, raw)
    end
    return asked
end

local function read_bound(index)
    local text = call('HGET', H, scope .. 'b' .. written(index))
    if not text then
        return nil
    end
    local content = nil
    if string.sub(text, 3, 3) == '+' then
        content = string.sub(text, 4)
    end
    return {keyed = string.sub(text, 1, 1) == '1', used = string.sub(text, 2, 2) == '1', content = content}
end

local function write_bound(index, bound)
    call('HSET', H, scope .. 'b' .. written(index), (bound.keyed and '1' or '0') .. (bound.used and '1' or '0')
        .. (bound.content and ('+' .. bound.content) or '-'))
end

local function free_member(raw, index)
    return scope .. raw .. string.format('%010.0f', index)
end

local function first_free(raw)
    local from = scope .. raw
    return call('ZRANGEBYLEX', R, '[' .. from .. '0000000000', '[' .. from .. '9999999999', 'LIMIT', 0, 1)[1]
end

local function wake()
    if head.waits == 1 then
        head.waits = 0
        call('PUBLISH', PREFIX .. 'changed', scope)
    end
end

-- The epoch, if all is known that was asked in a session; F where a gateway served it before the epoch that did not tell.
local function how_whole(session, known, epoch)
    if known == epoch or known == 'F' then
        return known
    end
    local missing = call('SMEMBERS', PREFIX .. 'missing')
    local forgot = #missing > 0 and call('HGET', H, '@forgot') == '1'
    for _, other in ipairs(missing) do
        if forgot or call('HEXISTS', H, session .. 'g' .. other) == 1 then
            return 'F'
        end
    end
    return epoch
end

-- --- one claim
local function read_claim(token, claims)
    local text = call('HGET', claims, token)
    if not text then
        return nil
    end
    local index, about = string.match(text, '^(%d+)|(.*)$', 18)
    return {
        scope = string.sub(text, 1, 16), ended = string.sub(text, 17, 17) == 'e', index = tonumber(index), about = about
    }
end

local function write_claim(token, ended, index, about)
    call('HSET', C, token, scope .. (ended and 'e' or 'o') .. written(index) .. '|' .. about)
    if call('HLEN', C) == 1 then
        call('PEXPIREAT', C, call('HGET', H, '@until'))
    end
end

-- Its answer has ended: it races no more.
local function complete(live, index)
    live.open = live.open - 1
    if live.open > 0 or not live.drawn then
        return
    end
    if live.since < head.races then
        put(scope .. 'r' .. written(index), '1')
    end
    live.drawn = false
    if call('HINCRBY', H, scope .. 'd' .. live.raw, -1) == 0 then
        call('HDEL', H, scope .. 'd' .. live.raw)
        head.kinds = head.kinds - 1
        if head.kinds == 0 then
            head.contended = 0
        end
    end
end

-- It is over. Says whether the index is released.
local function settle(live, index, used)
    live.claims = live.claims - 1
    live.used = live.used or used
    if live.claims > 0 then
        write_live(index, live)
        return false
    end
    call('HDEL', H, scope .. 'i' .. written(index))
    local bound = read_bound(index)
    if not bound then
        local asked = read_asked(live.raw)
        if asked then
            asked.live = asked.live - 1
            write_asked(live.raw, asked)
        end
        if not live.used then
            call('ZADD', R, 0, free_member(live.raw, index))
        end
    elseif live.used then
        bound.used = true
        write_bound(index, bound)
    elseif not bound.keyed then
        bound.content = nil
        write_bound(index, bound)
    end
    return not live.used
end

-- A request came to nothing, and none of its session came after it: its session, if it was created, will have failed
-- (sessions.lua).
local function undelivered(about)
    local session, all, trouble = cjson.decode(about)[1], PREFIX .. 'sessions:all', PREFIX .. 'sessions:trouble'
    if call('HEXISTS', all, session) == 1 and call('HEXISTS', PREFIX .. 'sessions:ended', session) == 0 then
        call('HSET', trouble, session, '"gateway-lost"')
        local left = call('PTTL', all)
        if left > 0 then
            call('PEXPIRE', trouble, left)
        end
    end
end

-- End all claims of a gateway. One whose answer had ended may have been delivered, and is used; others are not, as far
-- as anybody knows. Gives each one's token, then whether its index is used (1 or 0) with the index, a bar, and what it was
-- about.
local function end_all(claims)
    local lost = {}
    for _, token in ipairs(call('HKEYS', claims)) do
        local claim = read_claim(token, claims)
        open(claim.scope, call('HGET', H, claim.scope))
        local live = read_live(claim.index)
        if live then
            if not claim.ended then
                complete(live, claim.index)
            end
            if settle(live, claim.index, claim.ended) and claim.index == head.next - 1 then
                undelivered(claim.about)
            end
        end
        wake()
        close()
        lost[#lost + 1] = token
        lost[#lost + 1] = (claim.ended and '1' or '0') .. written(claim.index) .. '|' .. claim.about
    end
    call('DEL', claims)
    return lost
end
