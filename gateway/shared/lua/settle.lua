-- One claim is over, used or not. Gives away, or done and whether the index is released; to who does not know the index
-- (seventh word) also that, and whether it raced. Asked again it changes nothing more.
-- A claim that was taken for its gateway's last word, and was used after all, takes its index back from the released.
local gateway, connection, number, token, used = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local name, index, raw = ARGV[6], ARGV[7], ARGV[8]
local got = call('HMGET', H, '@server', '@g' .. gateway)
if got[2] ~= connection or not is_server(got[1]) then
    return {'away'}
end
local claim = read_claim(token, C)
if not claim then
    if used and index ~= '' then
        call('ZREM', R, name .. raw .. string.format('%010.0f', tonumber(index)))
    end
    return {'gone', 0}
end
open(claim.scope, call('HGET', H, claim.scope))
local live = read_live(claim.index)
local race = index == '' and raced(claim.index, live)
if not claim.ended then
    complete(live, claim.index)
end
local released = settle(live, claim.index, used)
call('HDEL', C, token)
wake()
put('@q' .. gateway, number)
close()
if index == '' then
    return {'done', released and 1 or 0, claim.index, race and 1 or 0}
end
return {'done', released and 1 or 0}
