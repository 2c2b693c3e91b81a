-- A gateway leaves: what it did is known, and nothing of it is under way any more.
local gateway, connection = ARGV[1], ARGV[2]
local got = call('HMGET', H, '@server', '@g' .. gateway)
if got[2] ~= connection or not is_server(got[1]) then
    return {'away'}
end
end_all(C)
call('HDEL', H, '@g' .. gateway)
call('ZREM', PREFIX .. 'beats', gateway)
call('ZADD', PREFIX .. 'gone', now_ms(), gateway)
call('PEXPIREAT', PREFIX .. 'gone', call('HGET', H, '@until'))
return {'left'}
