-- Who came first to something in a group: what is kept, else the word that is given, which is kept then if there is room.
-- KEYS[1] is a hash, ARGV the field, the word, most fields, and milliseconds for which all of them are kept after the last.
local first = redis.call('HGET', KEYS[1], ARGV[1])
if first then
    return first
end
if redis.call('HLEN', KEYS[1]) < tonumber(ARGV[3]) then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
return ARGV[2]
