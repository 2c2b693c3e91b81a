-- A gateway takes part in a run, or learns what stands in its way.
--   open, epoch, memory, tokens, changes, gateways
--                                  it takes part: its connection counts from now on, and earlier ones do not; the claims
--                                  that are kept as its own, the number of the last change (changes.lua), and all that
--                                  took part so far
--   report, epoch, memory, number  it must first tell what it did: all after its call of that number
--   wait, epoch, memory, ms        others must
--   differs, settings              the run began with other settings that decide
--   over                           the run was idle for as long as runs are kept
--   behind                         a later connection of this gateway takes part already
-- A memory is what one server remembers from one time on. When the server is not the one that the state was kept by, or
-- knows nothing of the run, or not what a gateway knows, it has forgotten or may have: a new memory begins, and with it
-- a new epoch. It opens when every gateway that may have done something has told so, or `lease` has passed. A run that
-- the server knows nothing of may be a new one: whoever knows it has `grace` to say so, unless this server has been
-- `settled` for longer.
local gateway, connection, deciding = ARGV[1], ARGV[2], ARGV[3]
local known, known_memory, reported = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local lease, grace, retention, settled = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10] == '1'

local now = now_ms()
local awaited, gone, missing, beats = PREFIX .. 'awaited', PREFIX .. 'gone', PREFIX .. 'missing', PREFIX .. 'beats'
is_torn()
local got = call(
    'HMGET', H, '@server', '@epoch', '@memory', '@phase', '@deciding', '@g' .. gateway, '@q' .. gateway
)
local epoch, memory, phase = tonumber(got[2]), got[3], got[4]

if got[5] and got[5] ~= deciding then
    return {'differs', got[5]}
end
if got[6] and tonumber(string.match(got[6], '^%d+')) > tonumber(connection) then
    return {'behind'}
end
if is_over() then
    return {'over'}
end

local function await(other)
    if not call('ZSCORE', gone, other) then
        call('SADD', awaited, other)
        call('PEXPIREAT', awaited, call('HGET', H, '@until'))
    end
end

local knows = known >= 0
local same = is_server(got[1])
if not same or (knows and known_memory ~= memory and not phase and known >= epoch) then
    local new = not got[1]
    local here = string.match(call('INFO', 'replication'), 'master_replid:(%x+)')
    epoch, memory = math.max(epoch or -1, known) + 1, here .. written(now)
    if new or call('SCARD', missing) == 0 then
        call('HSET', H, '@forgot', '0')
    end
    call('HSET', H, '@server', here, '@process', process(), '@epoch', epoch, '@memory', memory, '@deciding', deciding)
    if new then
        call('DEL', R, C)
    end
    call('ZADD', R, 0, '')
    call('DEL', awaited)
    keep_until(now + retention, retention)
    for _, other in ipairs(call('ZRANGE', beats, 0, -1)) do
        await(other)
        call('ZADD', beats, now, other)
        -- Its connection counts no more, though the server may be the same.
        if call('HEXISTS', H, '@g' .. other) == 1 then
            call('HSET', H, '@g' .. other, '0:')
        end
        if new then
            call('DEL', PREFIX .. 'claims:' .. other)
        end
    end
    if not new or knows or not settled then
        phase = written(new and now + grace or now) .. ',' .. written(now + lease)
        call('HSET', H, '@phase', phase)
    end
end

local stale = knows and known_memory ~= memory
if phase and stale and known >= epoch then
    epoch = known + 1
    call('HSET', H, '@epoch', epoch)
end
if stale and reported ~= memory then
    if phase then
        if not got[6] then
            call('HSET', H, '@forgot', '1')
        end
        await(gateway)
    end
    return {'report', epoch, memory, got[7] or '-1'}
end
if phase then
    call('SREM', awaited, gateway)
    local from, to = string.match(phase, '^(%d+),(%d+)$')
    local others = call('SCARD', awaited) > 0
    if now < tonumber(to) and (now < tonumber(from) or others) then
        return {'wait', epoch, memory, (others and tonumber(to) or tonumber(from)) - now}
    end
    for _, other in ipairs(call('SMEMBERS', awaited)) do
        call('SADD', missing, other)
    end
    call('DEL', awaited)
    call('HDEL', H, '@phase')
end
call('SREM', missing, gateway)
call('HSET', H, '@g' .. gateway, connection .. ':' .. epoch)
call('ZADD', beats, now, gateway)
call('ZREM', gone, gateway)
for _, key in ipairs({missing, beats}) do
    call('PEXPIREAT', key, call('HGET', H, '@until'))
end
local others = call('ZRANGE', gone, 0, -1)
for _, other in ipairs(call('ZRANGE', beats, 0, -1)) do
    others[#others + 1] = other
end
for _, other in ipairs(call('SMEMBERS', missing)) do
    others[#others + 1] = other
end
local last = number_of(call('HGET', PREFIX .. 'changes', 'number'))
return {'open', epoch, memory, call('HKEYS', C), last, others}
