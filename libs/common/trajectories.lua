#!lua name=jigsaw_trajectories
-- The life of a trajectory, enforced inside the server: states, leases, fencing epochs, appended tokens.
--
-- A record is a hash; its tokens are a string beside it that only ever grows. Every write by a worker names the epoch it
-- was given at claim; a write with an older epoch is refused with STALE, so a worker that was slow, frozen or cut off can
-- wake up and do no harm. Times are the server's own, in milliseconds.
--
--   pending --claim--> running --finish--> finished --score--> scored
--      ^------release / retry------|   \--fail--> failed

local TOKEN_BYTES = 16

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function get(key, field)
  return redis.call('HGET', key, field)
end

local function stale(key, epoch)
  return redis.error_reply('STALE epoch ' .. tostring(epoch) .. ' of ' .. key .. ': epoch is ' .. tostring(get(key, 'epoch'))
    .. ', state ' .. tostring(get(key, 'state')))
end

-- Whether the caller with this epoch still owns a running record.
local function owns(key, epoch)
  local held = redis.call('HMGET', key, 'epoch', 'state')
  return held[1] == epoch and held[2] == 'running'
end

-- KEYS record, tokens, index   ARGV member, field, value, ...     -> 1 created, 0 was there
local function create(keys, args)
  if redis.call('EXISTS', keys[1]) == 1 then return 0 end
  local fields = {'state', 'pending', 'epoch', '0', 'attempts', '0', 'not_before', '0'}
  for i = 2, #args do fields[#fields + 1] = args[i] end
  redis.call('HSET', keys[1], unpack(fields))
  redis.call('SADD', keys[3], args[1])
  return 1
end

-- KEYS record, tokens   ARGV owner, ttl_ms
-- -> {'claimed', epoch, attempts, spec, tokens} | {'held'} | {'later', ms} | {'exhausted'} | {state} | {'gone'}
local function claim(keys, args)
  local f = redis.call('HMGET', keys[1], 'state', 'epoch', 'expires', 'attempts', 'max_attempts', 'not_before', 'spec')
  local state = f[1]
  if not state then return {'gone'} end
  local now = now_ms()
  if state == 'running' then
    if tonumber(f[3]) > now then return {'held'} end
  elseif state ~= 'pending' then
    return {state}
  end
  if tonumber(f[6]) > now then return {'later', tonumber(f[6]) - now} end
  if tonumber(f[4]) >= tonumber(f[5]) then
    redis.call('HSET', keys[1], 'state', 'failed', 'epoch', f[2] + 1, 'error',
      get(keys[1], 'error') or ('its worker was lost ' .. f[4] .. ' times'))
    return {'exhausted'}
  end
  local epoch, attempts = f[2] + 1, f[4] + 1
  redis.call('HSET', keys[1], 'state', 'running', 'epoch', epoch, 'attempts', attempts, 'owner', args[1],
    'expires', now + args[2])
  return {'claimed', epoch, attempts, f[7], redis.call('GET', keys[2]) or ''}
end

-- KEYS record   ARGV epoch, ttl_ms
local function renew(keys, args)
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  redis.call('HSET', keys[1], 'expires', now_ms() + args[2])
  return 1
end

-- Append safely: the caller says how long it believes the string is, so a repeat of a write that had arrived is a no-op.
local function put_tokens(tokens, expected, data)
  local have = redis.call('STRLEN', tokens) / TOKEN_BYTES
  local count = #data / TOKEN_BYTES
  if have == expected then
    if count > 0 then redis.call('APPEND', tokens, data) end
    return true
  end
  return have == expected + count and redis.call('GETRANGE', tokens, expected * TOKEN_BYTES, -1) == data
end

local function mismatch(keys, expected)
  return redis.error_reply('LENGTH ' .. keys[1] .. ': expected ' .. tostring(expected) .. ' tokens, has '
    .. tostring(redis.call('STRLEN', keys[2]) / TOKEN_BYTES))
end

-- KEYS record, tokens   ARGV epoch, expected_length, data
local function append(keys, args)
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  if not put_tokens(keys[2], tonumber(args[2]), args[3]) then return mismatch(keys, args[2]) end
  return 1
end

-- KEYS record, tokens   ARGV epoch, expected_length, data, stop_reason, text, turns
local function finish(keys, args)
  local held = redis.call('HMGET', keys[1], 'epoch', 'state')
  if held[1] == args[1] and held[2] == 'finished' then return 0 end
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  if not put_tokens(keys[2], tonumber(args[2]), args[3]) then return mismatch(keys, args[2]) end
  redis.call('HSET', keys[1], 'state', 'finished', 'stop_reason', args[4], 'text', args[5], 'turns', args[6])
  return 1
end

-- KEYS record   ARGV epoch     the owner gives the record back unharmed: this claim doesn't count as an attempt
local function release(keys, args)
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  redis.call('HSET', keys[1], 'state', 'pending', 'epoch', args[1] + 1, 'attempts', get(keys[1], 'attempts') - 1)
  return 1
end

-- KEYS record, tokens   ARGV epoch     begin again from the prompt, under the same claim
local function restart(keys, args)
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  redis.call('DEL', keys[2])
  return 1
end

-- KEYS record   ARGV epoch, error, backoff_ms (negative: no retry)     -> 'pending' | 'failed'
local function fail(keys, args)
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  local f = redis.call('HMGET', keys[1], 'attempts', 'max_attempts')
  local again = tonumber(args[3]) >= 0 and tonumber(f[1]) < tonumber(f[2])
  local state = again and 'pending' or 'failed'
  redis.call('HSET', keys[1], 'state', state, 'epoch', args[1] + 1, 'error', args[2],
    'not_before', again and now_ms() + args[3] or 0)
  return state
end

-- KEYS record   ARGV reward, reason, ok ('1' a valid score, '0' the scorer failed)     -> 1 now effective, 0 was settled
local function score(keys, args)
  if get(keys[1], 'state') ~= 'finished' then return 0 end
  if args[3] == '1' then
    redis.call('HSET', keys[1], 'state', 'scored', 'reward', args[1], 'reason', args[2])
  else
    redis.call('HSET', keys[1], 'state', 'failed', 'error', args[2])
  end
  return 1
end

-- KEYS record     -> its state; 'expired' for a running one whose lease has run out, 'gone' for none
local function state(keys, args)
  local f = redis.call('HMGET', keys[1], 'state', 'expires')
  if f[1] == 'running' and tonumber(f[2]) <= now_ms() then return 'expired' end
  return f[1] or 'gone'
end

-- Only the trainer that holds the job may forget records: its successor would need them.
-- KEYS index, hold, record, tokens, record, tokens, ...   ARGV incarnation ('' for a job that has ended), member, ...
local function forget(keys, args)
  if args[1] ~= '' and (redis.call('HGET', keys[2], 'incarnation') or '0') ~= args[1] then
    return redis.error_reply('STALE incarnation ' .. args[1] .. ' of ' .. keys[2])
  end
  for i = 3, #keys do redis.call('DEL', keys[i]) end
  for i = 2, #args do redis.call('SREM', keys[1], args[i]) end
  return #args - 1
end

-- A trainer takes a job; the number only grows, and everything that it publishes carries it.
-- KEYS hold   ARGV owner     -> incarnation
local function hold(keys, args)
  redis.call('HSET', keys[1], 'owner', args[1])
  return redis.call('HINCRBY', keys[1], 'incarnation', 1)
end

redis.register_function('jigsaw_create', create)
redis.register_function('jigsaw_claim', claim)
redis.register_function('jigsaw_renew', renew)
redis.register_function('jigsaw_append', append)
redis.register_function('jigsaw_finish', finish)
redis.register_function('jigsaw_release', release)
redis.register_function('jigsaw_restart', restart)
redis.register_function('jigsaw_fail', fail)
redis.register_function('jigsaw_score', score)
redis.register_function{function_name = 'jigsaw_state', callback = state, flags = {'no-writes'}}
redis.register_function('jigsaw_forget', forget)
redis.register_function('jigsaw_hold', hold)
