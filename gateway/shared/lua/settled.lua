-- For how many milliseconds this server has been the one that gateways meet at.
local here = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local got = redis.call('HMGET', KEYS[1], 'process', 'since')
if got[1] ~= here then
    redis.call('HSET', KEYS[1], 'process', here, 'since', string.format('%.0f', now))
    return 0
end
return now - tonumber(got[2])
