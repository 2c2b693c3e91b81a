-- A gateway tells what it did, before it takes part in a memory that may lack it, and what others did that can tell no
-- more (third word, their names parted by commas). Of all that it knows of (fourth word) those are awaited that this memory
-- has not heard; where that has opened already they are missing. Then twelve words for each index:
--   scope, session, kind, bytes, index, content, key, latest repeat, whether it raced, how it stands, what it is about,
--   and its live claims by their tokens, each with "o" or "e" before it, parted by commas
-- Kind is "n" where the client numbered. It stands "u" (used), "r" (released), "m" (used, and of its bytes many asked) or
-- "x" (used, and known to be given twice). "w" is no index, but what bytes stood for when one of them, of such a repeat,
-- had waited for a rival in vain: -1, -2 and -3 as in rule.lua. Told again it changes nothing. What another has told
-- already stays: used wins.
-- Of an index that went to another before it was told of nothing is taken in, and its session is fenced from then on: that
-- is told once, as the ends of the lost are (beat.lua).
local gateway, memory = ARGV[1], ARGV[2]
if call('HGET', H, '@memory') ~= memory or not is_server(call('HGET', H, '@server')) then
    return {'away'}
end

-- Whether this memory has issued an index for something else than what is told of now, or has given its key another.
local function is_anothers(kind, session, raw, index, content, key, stands, bound, fresh)
    local kept = key ~= '' and call('HGET', H, session .. 'k' .. key)
    if kept then
        return string.sub(kept, 1, 17 + #written(index)) ~= scope .. written(index) .. '|'
    elseif kind == 'n' then
        return stands ~= 'r' and bound and bound.content and bound.content ~= content
    elseif fresh then
        return false
    end
    local asked = key == '' and not bound and read_asked(raw)
    return not asked or (asked.index ~= index and call('HGET', H, scope .. 'o' .. written(index)) ~= raw)
end

local function fence(session, index, about)
    if call('HSETNX', H, session .. 't', '1') == 1 then
        call('HSET', PREFIX .. 'ends', gateway .. ' ' .. about, gateway .. '|2' .. written(index) .. '|' .. about)
        call('PEXPIREAT', PREFIX .. 'ends', call('HGET', H, '@until'))
    end
    put(session, 'F')
end

-- Two requests of the same bytes are told from one and its retries by their repeats, which count upwards.
local function tell_wait(raw, index, latest)
    local asked = read_asked(raw) or {index = index, latest = latest, live = 0}
    local before = asked.index
    if before >= 0 and before ~= index and (index >= MANY or asked.latest <= latest) then
        asked.index = MANY
        own(before, raw)
    elseif before < MANY and index >= MANY then
        asked.index = index
    end
    if asked.index == MANY then
        own(index, raw)
    end
    asked.latest = math.max(asked.latest, latest)
    write_asked(raw, asked)
end

local function tell(at)
    local session, kind, raw, index = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4])
    local content, key, latest, race = ARGV[at + 5], ARGV[at + 6], tonumber(ARGV[at + 7]), ARGV[at + 8] == '1'
    local stands, about, tokens = ARGV[at + 9], ARGV[at + 10], ARGV[at + 11]
    open(ARGV[at], call('HGET', H, ARGV[at]))
    if stands == 'w' then
        tell_wait(raw, index, latest)
        close()
        return
    end
    local bound = read_bound(index)
    local fresh = not bound
    if kind ~= 'n' then
        fresh = index >= head.next or call('HDEL', H, scope .. 'h' .. written(index)) == 1
        for hole = head.next, index - 1 do
            call('HSET', H, scope .. 'h' .. written(hole), '1')
        end
        head.next = math.max(head.next, index + 1)
    end
    if head.kind == '' then
        head.kind = kind
    end
    put(session .. 'g' .. gateway, '1')
    if stands == 'x' then
        call('HSET', H, session .. 't', '1')
        put(session, 'F')
    end
    if is_anothers(kind, session, raw, index, content, key, stands, bound, fresh) then
        fence(session, index, about)
        close()
        return
    end
    if race then
        put(scope .. 'r' .. written(index), '1')
    end

    local used = stands ~= 'r'
    local named = bound ~= nil or key ~= '' or kind == 'n'
    if named then
        bound = bound or {keyed = false, used = false}
        if content ~= '' then
            bound.content = bound.content or content
        end
        bound.keyed = bound.keyed or key ~= ''
        bound.used = bound.used or used
        if key ~= '' then
            put(session .. 'k' .. key, scope .. written(index) .. '|' .. content)
        end
    end
    local asked = not named and (read_asked(raw) or {index = index, latest = latest, live = 0})
    if asked and fresh then
        -- Another waited with these bytes. One that raced may have waited itself, and that may be what was kept.
        local waited = asked.index < MANY and (latest < asked.latest or (latest == asked.latest and not race))
        if stands == 'm' or waited or (asked.index ~= index and asked.index >= MANY) then
            own(asked.index, raw)
            own(index, raw)
            asked.index = MANY
        else
            asked.index = index
        end
        asked.latest = math.max(asked.latest, latest)
    end

    local live = read_live(index)
    local began = not live
    for state, token in string.gmatch(tokens, '([oe])(%d+)') do
        if not read_claim(token, C) then
            live = live or {
                claims = 0, open = 0, drawn = false, since = head.races, raw = raw,
                used = (named and bound.used)
                    or (not named and not fresh and call('ZREM', R, free_member(raw, index)) == 0),
            }
            live.claims = live.claims + 1
            if state == 'o' then
                live.open = live.open + 1
                if fresh and kind ~= 'n' and not live.drawn then
                    live.drawn = true
                    if call('HINCRBY', H, scope .. 'd' .. raw, 1) == 1 then
                        head.kinds = head.kinds + 1
                    end
                end
            end
            write_claim(token, state == 'e', index, about)
        end
    end
    if live then
        live.used = live.used or used
        write_live(index, live)
        if began and asked then
            asked.live = asked.live + 1
        end
    elseif used then
        call('ZREM', R, free_member(raw, index))
    elseif fresh and not named then
        call('ZADD', R, 0, free_member(raw, index))
    elseif named and fresh and not bound.keyed then
        bound.content = nil
    end
    if named then
        write_bound(index, bound)
    elseif asked then
        write_asked(raw, asked)
    end
    close()
end

local awaited, missing, gone, beats = PREFIX .. 'awaited', PREFIX .. 'missing', PREFIX .. 'gone', PREFIX .. 'beats'
local opened = call('HEXISTS', H, '@phase') == 0
for other in string.gmatch(ARGV[4], '[^,]+') do
    local known = call('ZSCORE', beats, other)
    if other ~= gateway and not call('ZSCORE', gone, other) and not (opened and known) then
        call('SADD', opened and missing or awaited, other)
        if not known then
            call('HSET', H, '@forgot', '1')
        end
    end
end
for other in string.gmatch(ARGV[3], '[^,]+') do
    call('SREM', awaited, other)
    call('SREM', missing, other)
    call('ZADD', gone, now_ms(), other)
end
if #ARGV > 4 then
    -- Should it end before it takes part, others find its claims by this.
    call('ZADD', beats, now_ms(), gateway)
end
for _, key in ipairs({awaited, missing, gone, beats}) do
    call('PEXPIREAT', key, call('HGET', H, '@until'))
end
for at = 5, #ARGV, 12 do
    tell(at)
end
return {'told'}
