-- What is known of a session and of one of its counters: whether it has asked, and the counter (rule.lua). KEYS[1] is the
-- state of the run, ARGV their names in it.
return { redis.call('HEXISTS', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[1], ARGV[2]) }
