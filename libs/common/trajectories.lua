#!lua name=jigsaw_trajectories
-- The life of a trajectory, enforced inside the server: states, leases, fencing epochs, appended tokens.
--
-- A record is a hash; its tokens are a string beside it that only ever grows. Every write by a worker names the epoch it
-- was given at claim; a write with an older epoch is refused with STALE, so a worker that was slow, frozen or cut off can
-- wake up and do no harm. Times are the server's own, in milliseconds.
--
--   pending --claim--> running --finish--> finished --score--> scored
--      ^---release, fail, die---|  \---fail, die---> failed <---|
--
-- A running record whose lease has run out may be claimed by anyone: its worker is taken to be dead. Deaths make a record a
-- suspect, which has to run alone on its worker; they never fail it, however many there are, unless it was alone and had not
-- got a single token further, twice.

local TOKEN_BYTES = 16
local SUSPECT_DEATHS = 2
local LONELY_DEATHS = 2

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

-- Writes that end an epoch are answered alike when they are repeated, as they are after an answer that was lost.
local function ended(key, what, epoch, answer)
  redis.call('HSET', key, 'ended_by', what .. ' ' .. epoch, 'ended_answer', answer)
  return answer
end

local function refuse(key, what, epoch)
  local last = redis.call('HMGET', key, 'ended_by', 'ended_answer')
  if last[1] ~= what .. ' ' .. epoch then return stale(key, epoch) end
  return tonumber(last[2]) or last[2]
end

local function token_count(tokens)
  return redis.call('STRLEN', tokens) / TOKEN_BYTES
end

-- Only the trainer that holds the job may create and forget its records: a replaced one would bring back what its successor
-- has trained and forgotten, or take away what it needs.
local function holds(key, incarnation)
  return incarnation == '' or (redis.call('HGET', key, 'incarnation') or '0') == incarnation
end

local function not_holding(key, incarnation)
  return redis.error_reply('STALE incarnation ' .. incarnation .. ' of ' .. key)
end

-- KEYS record, tokens, index, hold   ARGV incarnation ('': whoever holds it), member, field, value, ... (spec, max_failures,
-- prompt_tokens)     -> 1 created, 0 was there
local function create(keys, args)
  if not holds(keys[4], args[1]) then return not_holding(keys[4], args[1]) end
  if redis.call('EXISTS', keys[1]) == 1 then return 0 end
  local fields = {'state', 'pending', 'epoch', '0', 'not_before', '0', 'claims', '0', 'failures', '0', 'deaths', '0',
    'lonely', '0', 'lonely_deaths', '0', 'base', '0', 'resumes', '0', 'moves', '0', 'recomputed', '0'}
  for i = 3, #args do fields[#fields + 1] = args[i] end
  redis.call('HSET', keys[1], unpack(fields))
  redis.call('SADD', keys[3], args[2])
  return 1
end

-- The worker of a running record, or its engine, died under it; `error` is nil if nobody lived to tell.
-- -> whether that fails the record
local function died(keys, error)
  local f = redis.call('HMGET', keys[1], 'deaths', 'lonely', 'lonely_deaths', 'base', 'error')
  local lonely_deaths = tonumber(f[3])
  if f[2] == '1' and token_count(keys[2]) == tonumber(f[4]) then lonely_deaths = lonely_deaths + 1 end
  error = error or f[5] or ''
  local poison = lonely_deaths >= LONELY_DEATHS
  if poison then
    error = 'killed its worker twice while it ran alone' .. (error ~= '' and '; last error: ' .. error or '')
  end
  redis.call('HSET', keys[1], 'deaths', f[1] + 1, 'lonely_deaths', lonely_deaths, 'error', error)
  return poison
end

-- What a worker gets that owns a record from now on.
local function given(keys, epoch)
  local f = redis.call('HMGET', keys[1], 'failures', 'deaths', 'spec')
  local alone = tonumber(f[2]) >= SUSPECT_DEATHS and 1 or 0
  return {'claimed', epoch, f[1], f[2], alone, f[3], redis.call('GET', keys[2]) or ''}
end

-- KEYS record, tokens   ARGV owner, ttl_ms, name of this call: repeated, it gives the same claim again
-- -> {'claimed', epoch, failures, deaths, alone, spec, tokens} | {'held'} | {'later', ms} | {'poisoned'}, now failed by this
--    very call | {state} | {'gone'}
local function claim(keys, args)
  local f = redis.call('HMGET', keys[1], 'state', 'epoch', 'expires', 'not_before', 'claims', 'resumes', 'recomputed',
    'prompt_tokens', 'offered', 'claimed_by')
  local state, now = f[1], now_ms()
  if not state then return {'gone'} end
  local epoch = f[2] + 1
  if state == 'running' then
    if f[10] == args[3] then
      redis.call('HSET', keys[1], 'expires', now + args[2])
      return given(keys, tonumber(f[2]))
    end
    if tonumber(f[3]) > now then return {'held'} end
    -- Nobody ran one that was handed over and wasn't adopted.
    if f[9] ~= '1' and died(keys) then
      redis.call('HSET', keys[1], 'state', 'failed', 'epoch', epoch)
      return {'poisoned'}
    end
  elseif state ~= 'pending' then
    return {state}
  elseif tonumber(f[4]) > now then
    return {'later', tonumber(f[4]) - now}
  end
  -- Later than any epoch of a life that the server has lost: one that it was given then must not be good again.
  epoch = math.max(epoch, now)
  local tokens = token_count(keys[2])
  local resumed, recomputed = 0, 0
  if tokens > 0 then resumed, recomputed = 1, f[8] + tokens end
  redis.call('HSET', keys[1], 'state', 'running', 'epoch', epoch, 'owner', args[1], 'expires', now + args[2],
    'claims', f[5] + 1, 'resumes', f[6] + resumed, 'recomputed', f[7] + recomputed, 'base', tokens, 'lonely', '0',
    'offered', '0', 'claimed_by', args[3])
  return given(keys, epoch)
end

-- The owner names its successor, who takes over by `adopt`; if it doesn't, the lease runs out.
-- KEYS record   ARGV epoch, to, ttl_ms     -> the new epoch
local function transfer(keys, args)
  if not owns(keys[1], args[1]) then return refuse(keys[1], 'transfer', args[1]) end
  local epoch = args[1] + 1
  redis.call('HSET', keys[1], 'epoch', epoch, 'owner', args[2], 'expires', now_ms() + args[3],
    'moves', get(keys[1], 'moves') + 1, 'lonely', '0', 'offered', '1', 'claimed_by', '')
  return ended(keys[1], 'transfer', args[1], epoch)
end

-- KEYS record, tokens   ARGV epoch, owner, ttl_ms     -> as claim, under the epoch of the transfer
local function adopt(keys, args)
  local f = redis.call('HMGET', keys[1], 'state', 'epoch', 'owner', 'recomputed', 'prompt_tokens')
  if f[1] ~= 'running' then return {f[1] or 'gone'} end
  if f[2] ~= args[1] or f[3] ~= args[2] then return {'held'} end
  local tokens = token_count(keys[2])
  redis.call('HSET', keys[1], 'expires', now_ms() + args[3], 'base', tokens, 'lonely', '0', 'offered', '0',
    'recomputed', f[4] + f[5] + tokens)
  return given(keys, tonumber(f[2]))
end

-- KEYS record   ARGV epoch, ttl_ms     -> 1
local function renew(keys, args)
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  redis.call('HSET', keys[1], 'expires', now_ms() + args[2])
  return 1
end

-- Append safely: the caller says how long it believes the string is, so a repeat of a write that had arrived, and may have
-- been followed by others, is a no-op.
local function put_tokens(tokens, expected, data)
  local have = token_count(tokens)
  local after = expected + #data / TOKEN_BYTES
  if have == expected then
    if after > have then redis.call('APPEND', tokens, data) end
    return true
  end
  return have >= after
    and redis.call('GETRANGE', tokens, expected * TOKEN_BYTES, after * TOKEN_BYTES - 1) == data
end

local function mismatch(keys, expected)
  return redis.error_reply('LENGTH ' .. keys[1] .. ': expected ' .. tostring(expected) .. ' tokens, has '
    .. tostring(token_count(keys[2])))
end

-- KEYS record, tokens   ARGV epoch, expected_length, data     -> 1
local function append(keys, args)
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  if not put_tokens(keys[2], tonumber(args[2]), args[3]) then return mismatch(keys, args[2]) end
  return 1
end

-- KEYS record, tokens   ARGV epoch, expected_length, data, stop_reason, text, turns     -> 1 now effective, 0 was finished
local function finish(keys, args)
  local held = redis.call('HMGET', keys[1], 'epoch', 'state')
  if held[1] == args[1] and held[2] == 'finished' then return 0 end
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  local is_last = token_count(keys[2]) <= args[2] + #args[3] / TOKEN_BYTES
  if not is_last or not put_tokens(keys[2], tonumber(args[2]), args[3]) then return mismatch(keys, args[2]) end
  redis.call('HSET', keys[1], 'state', 'finished', 'stop_reason', args[4], 'text', args[5], 'turns', args[6])
  return 1
end

-- KEYS record   ARGV epoch     the owner gives the record back unharmed: no count changes     -> 1
local function release(keys, args)
  if not owns(keys[1], args[1]) then return refuse(keys[1], 'release', args[1]) end
  redis.call('HSET', keys[1], 'state', 'pending', 'epoch', args[1] + 1)
  return ended(keys[1], 'release', args[1], 1)
end

-- The owner begins again from the prompt, under an epoch of its own: a copy of this call or of an append before it that a
-- broken connection delivers late must not touch the tokens that come now.
-- KEYS record, tokens   ARGV epoch     -> the new epoch
local function restart(keys, args)
  if not owns(keys[1], args[1]) then return refuse(keys[1], 'restart', args[1]) end
  local epoch = args[1] + 1
  redis.call('DEL', keys[2])
  redis.call('HSET', keys[1], 'epoch', epoch, 'base', '0')
  return ended(keys[1], 'restart', args[1], epoch)
end

-- KEYS record   ARGV epoch     the owner runs nothing else beside it from now on     -> 1
local function alone(keys, args)
  if not owns(keys[1], args[1]) then return stale(keys[1], args[1]) end
  redis.call('HSET', keys[1], 'lonely', '1')
  return 1
end

-- KEYS record, tokens   ARGV epoch, error     the owner's engine died under it     -> 'pending' | 'failed'
local function die(keys, args)
  if not owns(keys[1], args[1]) then return refuse(keys[1], 'die', args[1]) end
  local state = died(keys, args[2]) and 'failed' or 'pending'
  redis.call('HSET', keys[1], 'state', state, 'epoch', args[1] + 1)
  return ended(keys[1], 'die', args[1], state)
end

-- KEYS record   ARGV epoch, error, backoff_ms (negative: no retry)     -> 'pending' | 'failed'
local function fail(keys, args)
  if not owns(keys[1], args[1]) then return refuse(keys[1], 'fail', args[1]) end
  local f = redis.call('HMGET', keys[1], 'failures', 'max_failures')
  local failures = f[1] + 1
  local again = tonumber(args[3]) >= 0 and failures < tonumber(f[2])
  local state = again and 'pending' or 'failed'
  redis.call('HSET', keys[1], 'state', state, 'epoch', args[1] + 1, 'failures', failures, 'error', args[2],
    'not_before', again and now_ms() + args[3] or 0)
  return ended(keys[1], 'fail', args[1], state)
end

-- The epoch says which text was scored: in a crash the server may lose that one, and another may be finished since.
-- KEYS record   ARGV epoch, reward, reason, ok ('1' a valid score, '0' the scorer failed)     -> 1 now effective, 0 not: it was
-- settled, or isn't what was scored
local function score(keys, args)
  local finished = redis.call('HMGET', keys[1], 'state', 'epoch')
  if finished[1] ~= 'finished' or finished[2] ~= args[1] then return 0 end
  if args[4] == '1' then
    redis.call('HSET', keys[1], 'state', 'scored', 'reward', args[2], 'reason', args[3])
  else
    redis.call('HSET', keys[1], 'state', 'failed', 'error', args[3])
  end
  return 1
end

-- KEYS record     -> its state; 'expired' for a running one whose lease has run out, 'gone' for none
local function state(keys, args)
  local f = redis.call('HMGET', keys[1], 'state', 'expires')
  if f[1] == 'running' and tonumber(f[2]) <= now_ms() then return 'expired' end
  return f[1] or 'gone'
end

-- KEYS index, hold, record, tokens, record, tokens, ...   ARGV incarnation ('' for a job that has ended), member, ...
local function forget(keys, args)
  if not holds(keys[2], args[1]) then return not_holding(keys[2], args[1]) end
  for i = 3, #keys do redis.call('DEL', keys[i]) end
  for i = 2, #args do redis.call('SREM', keys[1], args[i]) end
  return #args - 1
end

-- A trainer takes a job; the number only grows, and everything that it publishes carries it.
-- KEYS hold   ARGV owner, above: the incarnation that it must be later than, which the server may have lost, still: '1' for an
-- owner that only goes on holding it     -> incarnation
local function hold(keys, args)
  if args[3] == '1' and redis.call('HGET', keys[1], 'owner') ~= args[1] then
    return redis.error_reply('STALE owner ' .. args[1] .. ' of ' .. keys[1])
  end
  local incarnation = math.max(tonumber(redis.call('HGET', keys[1], 'incarnation') or '0'), tonumber(args[2])) + 1
  redis.call('HSET', keys[1], 'owner', args[1], 'incarnation', incarnation)
  return incarnation
end

redis.register_function('jigsaw_create', create)
redis.register_function('jigsaw_claim', claim)
redis.register_function('jigsaw_transfer', transfer)
redis.register_function('jigsaw_adopt', adopt)
redis.register_function('jigsaw_renew', renew)
redis.register_function('jigsaw_append', append)
redis.register_function('jigsaw_finish', finish)
redis.register_function('jigsaw_release', release)
redis.register_function('jigsaw_restart', restart)
redis.register_function('jigsaw_alone', alone)
redis.register_function('jigsaw_die', die)
redis.register_function('jigsaw_fail', fail)
redis.register_function('jigsaw_score', score)
redis.register_function{function_name = 'jigsaw_state', callback = state, flags = {'no-writes'}}
redis.register_function('jigsaw_forget', forget)
redis.register_function('jigsaw_hold', hold)
