-- What was changed at any gateway of a run, of the fleet and of weights: one order for all of them.
--
-- ARGV  operation, gateway, what it takes part as, then what the operation takes
--
-- changes          hash: number, of the last change; and what stands now, each as the line of the change that made it:
--                  gate:{pool}, weights:{pool}, replica:{name}, drain:{name}, accept:{name}, verdict:{name}
-- changes:list     stream: number-0 → line, the last of them. A line: number, time in ms, what, its words as JSON
-- changes:heard    hash: gateway → the number up to which it has made them, and what it has in pools that are shut
-- changes:removed  sorted set: name of a replica that was taken out → number. Only so many are remembered
--
-- Numbers of an epoch begin above those of all earlier ones: what a server forgot is never taken for what came since.
local operation, gateway, connection = ARGV[1], ARGV[2], ARGV[3]
local FIRST = 4
local KEPT, REMOVED, EPOCH = 1000, 1000, 1000000000
local ABOUT, LIST = PREFIX .. 'changes', PREFIX .. 'changes:list'
local HEARD, GONE = PREFIX .. 'changes:heard', PREFIX .. 'changes:removed'
local BEATS = PREFIX .. 'beats'
local STANDS_AS = {
    pause = 'gate', resume = 'gate', weights = 'weights', add = 'replica', remove = 'replica', drain = 'drain',
    accept = 'accept', verdict = 'verdict',
}

local got = call('HMGET', H, '@server', '@g' .. gateway, '@epoch', '@until')
local here = got[2] == connection and is_server(got[1])
local last = number_of(call('HGET', ABOUT, 'number'))
local now = now_ms()

local function field(what, pool, name)
    local as = STANDS_AS[what]
    return as .. ':' .. ((as == 'gate' or as == 'weights') and pool or name)
end

-- Number, time and what of the change that stands there.
local function standing(at)
    local line = call('HGET', ABOUT, at)
    if line then
        return string.match(line, '^(%d+) (%d+) (%l+) ')
    end
end

local function stand(number, what, pool, name, line)
    call('HSET', ABOUT, field(what, pool, name), line)
    if what == 'add' or what == 'remove' then
        call('HDEL', ABOUT, 'drain:' .. name, 'accept:' .. name, 'verdict:' .. name)
        call('ZREM', GONE, name)
    end
    if what == 'remove' then
        call('ZADD', GONE, number, name)
        for _, oldest in ipairs(call('ZRANGE', GONE, 0, -1 - REMOVED)) do
            call('ZREM', GONE, oldest)
            call('HDEL', ABOUT, 'replica:' .. oldest)
        end
    end
end

local function keep()
    if got[4] then
        for _, key in ipairs({ABOUT, LIST, HEARD, GONE}) do
            call('PEXPIREAT', key, got[4])
        end
    end
end

local operations = {}

-- Of each change five words: what, pool, name, the number of the change that the pool's gate must stand by, or nothing, and
-- its words as JSON. All are made or none.
--   made, number of the last   contended, pool   exists, name
function operations.change()
    for at = FIRST, #ARGV, 5 do
        local what, pool, name, after = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
        local number = standing('gate:' .. pool) or '0'
        local _, _, stands = standing('replica:' .. name)
        if after ~= '' and after ~= number then
            return {'contended', pool}
        elseif what == 'add' and stands == 'add' then
            return {'exists', name}
        end
    end
    last = math.max(last, tonumber(got[3]) * EPOCH)
    for at = FIRST, #ARGV, 5 do
        local what, pool, name, text = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 4]
        local _, since, stands = standing('gate:' .. pool)
        local time = what == 'pause' and stands == 'pause' and since or written(now)
        last = last + 1
        local number = written(last)
        local line = number .. ' ' .. time .. ' ' .. what .. ' ' .. text
        stand(last, what, pool, name, line)
        call('XADD', LIST, 'MAXLEN', '~', KEPT, number .. '-0', 'c', line)
        call('PUBLISH', ABOUT, line)
    end
    call('HSET', ABOUT, 'number', written(last))
    keep()
    return {'made', last}
end

-- The number up to which the gateway has made the changes, and what it has in pools that are shut.
--   here, number of the last, the lines between or nothing where they are kept no more
function operations.look()
    local known = tonumber(ARGV[FIRST])
    call('HSET', HEARD, gateway, ARGV[FIRST] .. ' ' .. ARGV[FIRST + 1])
    keep()
    local lines = {}
    if known < last then
        local entries = call('XRANGE', LIST, written(known + 1) .. '-0', '+', 'COUNT', KEPT)
        if #entries ~= last - known then
            return {'here', last, false}
        end
        for _, entry in ipairs(entries) do
            lines[#lines + 1] = entry[2][2]
        end
    end
    return {'here', last, lines}
end

--   here, number of the last, the lines of all that stands
function operations.all()
    local lines, all = {}, call('HGETALL', ABOUT)
    for each = 1, #all, 2 do
        if all[each] ~= 'number' then
            lines[#lines + 1] = all[each + 1]
        end
    end
    return {'here', last, lines}
end

-- Milliseconds that what a gateway that has gone had in the engines may take to end there, and those of a lease.
--   here, of each that lives its name and what it said last, of each that has gone this too
function operations.who()
    local ending, lease = tonumber(ARGV[FIRST]), tonumber(ARGV[FIRST + 1])
    local live, gone, lives = {}, {}, {}
    for _, other in ipairs(call('ZRANGE', BEATS, 0, -1)) do
        if tonumber(call('ZSCORE', BEATS, other)) >= now - lease then
            lives[other] = true
            live[#live + 1] = other
            live[#live + 1] = call('HGET', HEARD, other) or ''
        end
    end
    local heard = call('HGETALL', HEARD)
    for each = 1, #heard, 2 do
        local other = heard[each]
        if not lives[other] then
            local beat = call('ZSCORE', BEATS, other)
            local since = beat and tonumber(beat) + lease or tonumber(call('ZSCORE', PREFIX .. 'gone', other) or '0')
            if now - since < ending then
                gone[#gone + 1] = other
                gone[#gone + 1] = heard[each + 1]
            else
                call('HDEL', HEARD, other)
            end
        end
    end
    return {'here', live, gone}
end

-- It leaves, and has nothing in any engine.
function operations.leave()
    call('HDEL', HEARD, gateway)
    return {'here'}
end

-- Before it takes part: what stands as far as it knows, for a server that may lack it. Five words each: number, what,
-- pool, name, line. Where another change stands the later one counts.
function operations.tell()
    local news, latest = false, last
    for at = FIRST, #ARGV, 5 do
        local number, what, pool, name = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
        local stands = standing(field(what, pool, name))
        latest = math.max(latest, number)
        if not stands or tonumber(stands) < number then
            stand(number, what, pool, name, ARGV[at + 4])
            news = news or number < last
        end
    end
    call('HSET', ABOUT, 'number', written(news and latest == last and last + 1 or latest))
    keep()
    return {'told'}
end

if operation ~= 'tell' and not here then
    return {'away'}
end
return operations[operation]()
