-- Take an index. Gives what came of it first:
--   away: the gateway must take part anew (take_part.lua)        fenced: the session may have been forgotten in part
--   wait, why; of a rival, without a key, also what the bytes stand for now (rule.lua)
--   refused, code, index
--   index, index, reused, raced, rivals, flag, fenced
local gateway, connection, token, name, session = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local kind, raw, content, number, key = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local latest, mode, about, retention = tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13], tonumber(ARGV[14])
local exclusive, waited, final, strict = mode % 2 > 0, mode % 4 > 1, mode % 8 > 3, mode % 16 > 7
number = tonumber(number)

local got = call('HMGET', H, '@server', '@g' .. gateway, '@until', '@epoch', session, name)
if got[2] ~= connection or not is_server(got[1]) or is_torn() then
    return {'away'}
end
open(name, got[6])

local whole = how_whole(session, got[5], got[4])
if whole == 'F' and strict then
    return {'fenced'}
end

if head.kind ~= '' and head.kind ~= kind and (head.kind == 'n' or kind == 'n') then
    return {'refused', 'mixed_order', head.kind == 'n' and 'client' or 'arrival'}
end

local index, live, asked, flag, numbered = nil, nil, nil, '', false
local reused, rivals, race, why = true, false, false, nil

local function draw()
    local mine = call('HGET', H, name .. 'd' .. raw)
    rivals = kind == 'a' and head.kinds > (mine and 1 or 0)
    if rivals and exclusive then
        why = 'racing'
        head.races = head.races + 1
        head.contended = 1
        return
    end
    index, reused = head.next, false
    head.next = head.next + 1
    live = hold(index, raw, false)
    live.drawn = true
    if not mine then
        head.kinds = head.kinds + 1
    end
    put(name .. 'd' .. raw, number_of(mine) + 1)
    if rivals then
        head.races = head.races + 1
    end
    live.since = head.races
    race = rivals or waited or head.contended == 1
    if race then
        put(name .. 'r' .. written(index), '1')
    end
end

local keyed = key ~= '' and call('HGET', H, session .. 'k' .. key)
if keyed then
    local at, what = string.match(keyed, '^(%d+)|(.*)$', 17)
    if what ~= content or string.sub(keyed, 1, 16) ~= name then
        return {'refused', 'idempotency_conflict', ''}
    end
    if number and number ~= tonumber(at) then
        return {'refused', 'idempotency_conflict', at}
    end
    index = tonumber(at)
    live = hold(index, raw, read_bound(index).used)
elseif number then
    numbered = true
    index = number
    local bound = read_bound(index)
    reused = bound ~= nil
    if not bound then
        bound = {keyed = false, used = false, content = content}
    elseif not bound.content then
        bound.content = content
    elseif bound.content ~= content then
        return {'refused', 'index_conflict', written(index)}
    end
    live = hold(index, raw, bound.used)
    bound.keyed = bound.keyed or key ~= ''
    write_bound(index, bound)
elseif key ~= '' then
    draw()
    if index then
        write_bound(index, {keyed = true, used = false, content = content})
    end
else
    asked = read_asked(raw)
    local free = first_free(raw)
    if free then
        call('ZREM', R, free)
        index = tonumber(string.sub(free, -10))
        live = hold(index, raw, false)
    elseif latest == 0 then
        draw()
    elseif not final and asked and asked.live > 0 then
        why = 'repeat'
    elseif not asked or asked.index == MANY or (latest <= asked.latest and not waited) then
        flag = 'retry-unmatched'
        draw()
    elseif asked.index < MANY then
        flag = asked.index == LATE and 'retry-unmatched' or ''
        draw()
    else
        flag, index = 'retry-shared', asked.index
        live = hold(index, raw, true)
    end
    if index then
        asked = noted(asked, raw, index, latest, waited)
        if live.claims == 1 then
            asked.live = asked.live + 1
        end
        write_asked(raw, asked)
    elseif why == 'racing' and not final and not (waited and asked) then
        asked = noted(asked, raw, latest == 0 and NONE or LATE, latest, false)
        write_asked(raw, asked)
    end
end

if not index then
    if final then
        close()
        return {'refused', 'racing_index', ''}
    end
    head.waits = 1
    close()
    if why == 'racing' and asked then
        return {'wait', why, asked.index}
    end
    return {'wait', why}
end

if key ~= '' and not keyed then
    put(session .. 'k' .. key, name .. written(index) .. '|' .. content)
end
prolong(got[3], retention)
head.kind = kind
write_live(index, live)
write_claim(token, false, index, about)
put(session, whole)
put(session .. 'g' .. gateway, '1')
put('@q' .. gateway, token)
race = race or (reused and not numbered and raced(index, live))
close()
return {'index', written(index), reused and 1 or 0, race and 1 or 0, rivals and 1 or 0, flag, whole == 'F' and 1 or 0}
