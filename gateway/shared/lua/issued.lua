-- Whether a request of a counter ever had this index: yes, no, or away (take_part.lua). Where that may have been forgotten: yes.
local gateway, connection, session, name, index = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local got = call('HMGET', H, '@server', '@g' .. gateway, '@epoch', session, name)
if got[2] ~= connection or not is_server(got[1]) then
    return {'away'}
end
open(name, got[5])
if index < head.next or read_bound(index) or how_whole(session, got[4], got[3]) == 'F' then
    return {'yes'}
end
return {'no'}
