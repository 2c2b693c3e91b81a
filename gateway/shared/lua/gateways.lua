-- All gateways of a run, those that are gone too. KEYS[1] is its state (rule.lua).
local prefix = string.sub(KEYS[1], 1, -6)
local all = redis.call('ZRANGE', prefix .. 'beats', 0, -1)
for _, gone in ipairs(redis.call('ZRANGE', prefix .. 'gone', 0, -1)) do
    all[#all + 1] = gone
end
return all
