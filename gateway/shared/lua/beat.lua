-- A gateway lives. Gives away, or who takes part, and for each that is gone its name and what its claims were about:
-- whoever notices ends them.
local gateway, connection, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local got = call('HMGET', H, '@server', '@g' .. gateway)
if got[2] ~= connection or not is_server(got[1]) then
    return {'away'}
end
local beats, gone, now = PREFIX .. 'beats', PREFIX .. 'gone', now_ms()
call('ZADD', beats, now, gateway)
local lost = {}
for _, other in ipairs(call('ZRANGEBYSCORE', beats, '-inf', '(' .. written(now - lease))) do
    lost[#lost + 1] = other
    lost[#lost + 1] = end_all(PREFIX .. 'claims:' .. other)
    call('HDEL', H, '@g' .. other)
    call('ZREM', beats, other)
    call('ZADD', gone, now, other)
    call('PEXPIREAT', gone, call('HGET', H, '@until'))
end
return {'here', call('ZRANGE', beats, 0, -1), lost}
