-- Managed by the Ansible collection onprem.vllm (role litellm_proxy)
-- Reads a body to its end and answers 413: a client that is cut off while it sends never sees why.
local answer = '{"error":{"message":"the body is too large","type":"proxy_error","param":null,"code":"413"}}'

core.register_service("too_large", "http", function(applet)
  repeat
    local piece = applet:receive(65536)
  until piece == nil or #piece == 0
  applet:set_status(413)
  applet:add_header("content-type", "application/json")
  applet:add_header("content-length", tostring(#answer))
  applet:start_response()
  applet:send(answer)
end)
