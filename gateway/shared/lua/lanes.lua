-- The lanes of one pool over all gateways, by the rule of gateway/lanes.py. One call is one step.
--
-- KEYS[1]  what every key begins with, the hash tag in it
-- ARGV     operation, gateway's token, connection's number, lease in ms, limit, whether places are held until an
--          engine is left (1 or 0), then what the operation takes
--
-- gateways           hash: token → when its lease ends, and the latest connection that it was heard by
-- gone:{token}       its lease ended and its places were taken over: it can never have one by this token again
-- places:{token}     set: lane|place, all that it has, in lanes and in queues
-- lane:{lane}:in     hash: place → replica; !replica once the request was given up
-- lane:{lane}:round  sorted set: who is let in next, in order; lane:{lane}:next: who came since that round began
-- lane:{lane}:queue  hash: place → its member of one of these
-- lane:{lane}:doubt  the replica where what left last may still be worked on
-- takes, drops       hashes: replica → places taken there, and places given up there before the answer had ended
-- quiet              the store has forgotten: nobody is let in until every gateway had time to say what it has
-- about              the server that this was written to last

local root = KEYS[1]
local operation, token, connection = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lease, limit, apart = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
local FIRST = 7
local KEPT = 30 * 86400

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function lane_key(lane, part)
    return root .. 'lane:' .. lane .. ':' .. part
end

local function owner(place)
    return string.match(place, '^[^:]*')
end

local function leased(gateway)
    local known = redis.call('HGET', root .. 'gateways', gateway)
    if not known then
        return false, 0
    end
    local till, heard = string.match(known, '(%d+) (%d+)')
    return tonumber(till) >= now, tonumber(heard)
end

local function extend()
    redis.call('HSET', root .. 'gateways', token, string.format('%d %d', now + lease, connection))
end

-- What this server is called, and whether it may lack what the one that is kept as the last was told. As in rule.lua:
-- without a former history the replication id of one process may change by itself.
local function identity(last)
    local history, former = string.match(
        redis.call('INFO', 'replication'), 'master_replid:(%x+).-master_replid2:(%x+)'
    )
    local process = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    local kept, by = string.match(last or '', '^(%x+) (%x+)$')
    local same = kept == history or (by == process and not string.find(former, '[^0]'))
    return history .. ' ' .. process, last and not same
end

local function quiet()
    return redis.call('EXISTS', root .. 'quiet') == 1
end

local function doubt(lane)
    return redis.call('GET', lane_key(lane, 'doubt')) or ''
end

local function let_in(lane, place, replica)
    redis.call('HSET', lane_key(lane, 'in'), place, replica)
    redis.call('HINCRBY', root .. 'takes', replica, 1)
end

-- The next in order go on, as far as there is room. Who has lost its lease is passed over.
local function advance(lane)
    if quiet() then
        return
    end
    local inside, round, next = lane_key(lane, 'in'), lane_key(lane, 'round'), lane_key(lane, 'next')
    while redis.call('HLEN', inside) < limit do
        local first = redis.call('ZPOPMIN', round)[1]
        if not first then
            if redis.call('EXISTS', next) == 0 then
                return
            end
            redis.call('RENAME', next, round)
            first = redis.call('ZPOPMIN', round)[1]
        end
        local replica, place = string.match(first, '|([^|]*)|([^|]*)$')
        local gateway = owner(place)
        redis.call('HDEL', lane_key(lane, 'queue'), place)
        if leased(gateway) then
            let_in(lane, place, replica)
            redis.call('PUBLISH', 'detgate:lanes:' .. gateway, place .. ' ' .. doubt(lane))
        else
            redis.call('SREM', root .. 'places:' .. gateway, lane .. '|' .. place)
        end
    end
end

local function unqueue(lane, place)
    local member = redis.call('HGET', lane_key(lane, 'queue'), place)
    if member then
        redis.call('HDEL', lane_key(lane, 'queue'), place)
        if redis.call('ZREM', lane_key(lane, 'round'), member) == 0 then
            redis.call('ZREM', lane_key(lane, 'next'), member)
        end
    end
end

-- Out of the queue, or of the lane: then true.
local function remove(gateway, lane, place)
    redis.call('SREM', root .. 'places:' .. gateway, lane .. '|' .. place)
    if redis.call('HDEL', lane_key(lane, 'in'), place) == 1 then
        return true
    end
    unqueue(lane, place)
    return false
end

local function places(gateway)
    local found = {}
    for _, entry in ipairs(redis.call('SMEMBERS', root .. 'places:' .. gateway)) do
        local lane, place = string.match(entry, '^(.*)|([^|]*)$')
        table.insert(found, { lane, place })
    end
    return found
end

local function bury(gateway)
    redis.call('HDEL', root .. 'gateways', gateway)
    redis.call('DEL', root .. 'places:' .. gateway)
    redis.call('SET', root .. 'gone:' .. gateway, 1, 'EX', KEPT)
end

local function tell_over(told, lane, place, replica)
    table.insert(told, lane)
    table.insert(told, place)
    table.insert(told, replica)
end

local operations = {}

-- lane, rank, replica, place … : all of a request, or none. Gives what became of each: 1 and the lane's doubt, or 0 for
-- its queue. However many they are, they are taken where so many do not wait yet.
function operations.join()
    local known, heard = leased(token)
    if not known or connection < heard then
        return { 'unknown' }
    end
    local queue, room, wanted = tonumber(ARGV[FIRST]), {}, {}
    local closed = quiet()
    for at = FIRST + 1, #ARGV, 4 do
        local lane = ARGV[at]
        if not room[lane] then
            room[lane] = closed and 0 or limit - redis.call('HLEN', lane_key(lane, 'in'))
            local waiting = redis.call('HLEN', lane_key(lane, 'queue'))
            if room[lane] <= 0 and waiting >= queue then
                return { 'full', lane, waiting }
            end
        end
        if room[lane] > 0 then
            room[lane] = room[lane] - 1
            wanted[at] = true
        end
    end
    local told = { 'ok' }
    for at = FIRST + 1, #ARGV, 4 do
        local lane, rank, replica, place = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
        redis.call('SADD', root .. 'places:' .. token, lane .. '|' .. place)
        if wanted[at] then
            let_in(lane, place, replica)
            table.insert(told, '1' .. doubt(lane))
        else
            local arrival = string.format('%016d', redis.call('INCR', root .. 'arrivals'))
            local member = rank .. arrival .. '|' .. replica .. '|' .. place
            redis.call('ZADD', lane_key(lane, 'next'), 0, member)
            redis.call('HSET', lane_key(lane, 'queue'), place, member)
            table.insert(told, '0')
        end
    end
    return told
end

-- lane, place, whether the request was given up before its answer had ended
function operations.leave()
    local lane, place, dropped = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
    local replica = redis.call('HGET', lane_key(lane, 'in'), place)
    if remove(token, lane, place) then
        if dropped == '1' then
            redis.call('HINCRBY', root .. 'drops', string.match(replica, '[^!]+'), 1)
        end
        advance(lane)
    end
    return { 'ok' }
end

-- lane, place: its request was given up, but may be worked on yet
function operations.mark()
    local inside = lane_key(ARGV[FIRST], 'in')
    local replica = redis.call('HGET', inside, ARGV[FIRST + 1])
    if replica and string.sub(replica, 1, 1) ~= '!' then
        redis.call('HSET', inside, ARGV[FIRST + 1], '!' .. replica)
    end
    return { 'ok' }
end

-- lane, place … : as join tells of each, or - where there is no such place. Nobody is forgotten who may go on.
function operations.look()
    local told = { 'ok' }
    local seen = {}
    for at = FIRST, #ARGV, 2 do
        if not seen[ARGV[at]] then
            seen[ARGV[at]] = true
            advance(ARGV[at])
        end
    end
    for at = FIRST, #ARGV, 2 do
        local lane, place = ARGV[at], ARGV[at + 1]
        if redis.call('HEXISTS', lane_key(lane, 'in'), place) == 1 then
            table.insert(told, '1' .. doubt(lane))
        else
            table.insert(told, redis.call('HEXISTS', lane_key(lane, 'queue'), place) == 1 and '0' or '-')
        end
    end
    return told
end

-- lane, place, replica: how many other requests the replica may have by this lane
function operations.inside()
    local count = 0
    local inside = redis.call('HGETALL', lane_key(ARGV[FIRST], 'in'))
    for at = 1, #inside, 2 do
        if inside[at] ~= ARGV[FIRST + 1] and inside[at + 1] == ARGV[FIRST + 2] then
            count = count + 1
        end
    end
    return { 'ok', count }
end

-- lane, replica; an empty one: there is no doubt any more
function operations.doubt()
    if ARGV[FIRST + 1] == '' then
        redis.call('DEL', lane_key(ARGV[FIRST], 'doubt'))
    else
        redis.call('SET', lane_key(ARGV[FIRST], 'doubt'), ARGV[FIRST + 1], 'EX', KEPT)
    end
    return { 'ok' }
end

-- lane, replica: places taken there so far, given up there so far, and in the lane now; of the latter those given up
function operations.tally()
    local replica, open, leaving = ARGV[FIRST + 1], 0, 0
    for _, value in ipairs(redis.call('HVALS', lane_key(ARGV[FIRST], 'in'))) do
        if value == replica then
            open = open + 1
        elseif value == '!' .. replica then
            leaving = leaving + 1
        end
    end
    local function counted(what)
        return tonumber(redis.call('HGET', root .. what, replica) or '0')
    end
    return { 'ok', counted('takes'), counted('drops'), open, leaving }
end

-- whether this gateway was here before, how many places it has in lanes, lane, place, replica …, then lane, place … of
-- those that wait. What else the store has of it, it has not; but for what it took over and may not have heard of, which
-- it is told as by renew.
function operations.enrol()
    if redis.call('EXISTS', root .. 'gone:' .. token) == 1 then
        return { 'gone' }
    end
    local _, heard = leased(token)
    if connection < heard then
        return { 'late' }
    end
    local before, count = ARGV[FIRST] == '1', tonumber(ARGV[FIRST + 1])
    local server, forgot = identity(redis.call('GET', root .. 'about'))
    local known = redis.call('HEXISTS', root .. 'gateways', token) == 1
    if forgot or (before and not known) then
        redis.call('SET', root .. 'quiet', 1, 'PX', lease)
    end
    redis.call('SET', root .. 'about', server, 'EX', KEPT)
    extend()
    local waiting, has = FIRST + 2 + 3 * count, {}
    for at = FIRST + 2, waiting - 1, 3 do
        local lane, place, replica = ARGV[at], ARGV[at + 1], ARGV[at + 2]
        has[place] = true
        -- In what the store has forgotten back to, it may have waited yet.
        unqueue(lane, place)
        redis.call('HSET', lane_key(lane, 'in'), place, replica)
        redis.call('SADD', root .. 'places:' .. token, lane .. '|' .. place)
    end
    for at = waiting, #ARGV, 2 do
        has[ARGV[at + 1]] = true
    end
    local told = { 'ok' }
    for _, found in ipairs(places(token)) do
        local lane, place = found[1], found[2]
        if has[place] then
            -- It is as both sides know it.
        elseif string.find(place, ':over-', 1, true) then
            tell_over(told, lane, place, string.sub(redis.call('HGET', lane_key(lane, 'in'), place), 2))
        elseif remove(token, lane, place) then
            advance(lane)
        end
    end
    return told
end

-- Keeps the lease, and ends those that have run out. Gives the places that became this gateway's to give back, when
-- the engine has let go of what was sent there: lane, place, replica …
function operations.renew()
    local known, heard = leased(token)
    if not known or connection < heard then
        return { 'unknown' }
    end
    extend()
    local told = { 'ok' }
    local all = redis.call('HKEYS', root .. 'gateways')
    table.sort(all)
    for _, gateway in ipairs(all) do
        if not leased(gateway) then
            local has = places(gateway)
            bury(gateway)
            for _, found in ipairs(has) do
                local lane, place = found[1], found[2]
                local replica = redis.call('HGET', lane_key(lane, 'in'), place)
                if remove(gateway, lane, place) then
                    if apart then
                        local mine = token .. ':over-' .. redis.call('INCR', root .. 'arrivals')
                        replica = string.match(replica, '[^!]+')
                        redis.call('HSET', lane_key(lane, 'in'), mine, '!' .. replica)
                        redis.call('SADD', root .. 'places:' .. token, lane .. '|' .. mine)
                        tell_over(told, lane, mine, replica)
                    else
                        advance(lane)
                    end
                end
            end
        end
    end
    return told
end

-- The gateway ends. What it still has in lanes is for the next to take over that looks.
function operations.retire()
    for _, found in ipairs(places(token)) do
        local lane, place = found[1], found[2]
        if apart and redis.call('HEXISTS', lane_key(lane, 'in'), place) == 1 then
            redis.call('HSET', root .. 'gateways', token, '0 0')
        elseif remove(token, lane, place) then
            advance(lane)
        end
    end
    if leased(token) then
        bury(token)
    end
    return { 'ok' }
end

return operations[operation]()
