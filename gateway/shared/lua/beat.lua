-- A gateway lives. Gives away; or here, who takes part, for each that was found gone now its name and the number of its
-- claims, and for claims of those that are gone: gateway and token, whether the index is used (1 or 0) with the index, a
-- bar, and what it was about; 2 and no token where an index was found to be given twice (report.lua); then the number of
-- the last change (changes.lua). Whoever notices ends the claims, and is told of their ends until it says, by the names that
-- stand from the fourth word on, that they are written down. Should it be gone by then, another is told.
local gateway, connection, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local got = call('HMGET', H, '@server', '@g' .. gateway)
if got[2] ~= connection or not is_server(got[1]) or is_torn() then
    return {'away'}
end
local TOLD_AT_ONCE = 500
local beats, gone, ends, now = PREFIX .. 'beats', PREFIX .. 'gone', PREFIX .. 'ends', now_ms()
for at = 4, #ARGV do
    call('HDEL', ends, ARGV[at])
end
call('ZADD', beats, now, gateway)
local left = {}
for _, other in ipairs(call('ZRANGEBYSCORE', beats, '-inf', '(' .. written(now - lease))) do
    local lost = end_all(PREFIX .. 'claims:' .. other)
    for each = 1, #lost, 2 do
        call('HSET', ends, other .. ' ' .. lost[each], gateway .. '|' .. lost[each + 1])
    end
    left[#left + 1] = other
    left[#left + 1] = #lost / 2
    call('HDEL', H, '@g' .. other)
    call('ZREM', beats, other)
    call('ZADD', gone, now, other)
    for _, key in ipairs({gone, ends}) do
        call('PEXPIREAT', key, call('HGET', H, '@until'))
    end
end
local told = {}
local kept = call('HGETALL', ends)
for each = 1, #kept, 2 do
    local teller, lost = string.match(kept[each + 1], '^([^|]*)|(.*)$')
    if teller ~= gateway and not call('ZSCORE', beats, teller) then
        teller = gateway
        call('HSET', ends, kept[each], gateway .. '|' .. lost)
    end
    if teller == gateway and #told < 2 * TOLD_AT_ONCE then
        told[#told + 1] = kept[each]
        told[#told + 1] = lost
    end
end
-- The last: how many keys the server has thrown away since it was started.
return {
    'here', call('ZRANGE', beats, 0, -1), left, told, number_of(call('HGET', PREFIX .. 'changes', 'number')),
    number_of(string.match(call('INFO', 'stats'), 'evicted_keys:(%d+)')),
}
