-- The answer of one claim has ended. Gives away, or whether the index raced. Asked again it changes nothing more.
local gateway, connection, number, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local got = call('HMGET', H, '@server', '@g' .. gateway)
if got[2] ~= connection or not is_server(got[1]) then
    return {'away'}
end
local claim = read_claim(token, C)
if not claim then
    return {'gone'}
end
open(claim.scope, call('HGET', H, claim.scope))
local live = read_live(claim.index)
if not claim.ended then
    complete(live, claim.index)
    write_live(claim.index, live)
    write_claim(token, true, claim.index, claim.about)
    wake()
    put('@q' .. gateway, number)
end
close()
return {'done', raced(claim.index, live) and 1 or 0}
