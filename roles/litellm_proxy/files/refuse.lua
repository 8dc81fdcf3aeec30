-- Managed by the Ansible collection onprem.vllm (role litellm_proxy)
-- Refusals that read a body to its end before they answer: a client that is cut off while it sends never sees why.
local function refuse(name, status, message, headers)
  local answer = '{"error":{"message":"' .. message .. '","type":"proxy_error","param":null,"code":"' .. status .. '"}}'

  core.register_service(name, "http", function(applet)
    repeat
      local piece = applet:receive(65536)
    until piece == nil or #piece == 0
    applet:set_status(status)
    applet:add_header("content-type", "application/json")
    applet:add_header("content-length", tostring(#answer))
    for header, value in pairs(headers or {}) do
      applet:add_header(header, value)
    end
    applet:start_response()
    applet:send(answer)
  end)
end

-- "timeout http-request" is for what fits the buffer. Of a larger body that is refused each further piece gets as long, or
-- whoever sends a byte now and then, with no key at all, keeps a connection for ever. Who shows a known key is not watched.
local PIECE = 65536
local NEVER_MS = 1000000000
local late = '{"error":{"message":"the request did not come in time","type":"proxy_error","param":null,"code":"408"}}'
local Pace = { flags = filter.FLT_CFG_FL_HTX }
Pace.__index = Pace

local function now_ms()
  local now = core.now()
  return now.sec * 1000 + now.usec // 1000
end

function Pace:new()
  return setmetatable({ patience_ms = self.patience_ms }, Pace)
end

function Pace:begin()
  self.missing, self.due_ms = PIECE, now_ms() + self.patience_ms
end

function Pace:http_headers(txn, message)
  if message.channel:is_resp() then
    self.answered = true
  elseif not message:eom() and (txn:get_var("txn.team") or "-") == "-" then
    self:begin()
    filter.register_data_filter(self, message.channel)
  end
  return filter.CONTINUE
end

-- Called with each part of the body, and when the time is up.
function Pace:http_payload(txn, message)
  self.missing = self.missing - message:input()
  -- A server that does not take what is there is not the client's fault.
  if self.missing <= 0 or message:output() > 0 then
    self:begin()
  end
  if now_ms() < self.due_ms then
    filter.wake_time(self.due_ms - now_ms())
  elseif self.answered then
    return filter.ERROR
  else
    self.answered = true
    txn:done(txn:reply({ status = 408, headers = { ["content-type"] = { "application/json" } }, body = late }))
  end
end

-- Else HAProxy 2.6 and 3.0 do nothing but look at the time that is over, until the answer is there.
function Pace:http_end()
  filter.wake_time(NEVER_MS)
  return filter.CONTINUE
end

core.register_filter("pace", Pace, function(pace, arguments)
  pace.patience_ms = arguments[1] * 1000
  return pace
end)

refuse("no_object", 400, "the body is no JSON object")
refuse("no_key", 401, "send the header Authorization: Bearer <key>", { ["www-authenticate"] = "Bearer" })
refuse("unknown_key", 401, "this key is not known here", { ["www-authenticate"] = "Bearer" })
refuse("too_large", 413, "the body is too large")
refuse("no_json", 415, "send the body as application/json")
refuse("used_up", 429, "this key has used up its requests per minute", { ["retry-after"] = "60" })
