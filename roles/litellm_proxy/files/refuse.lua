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

refuse("no_object", 400, "the body is no JSON object")
refuse("no_key", 401, "send the header Authorization: Bearer <key>", { ["www-authenticate"] = "Bearer" })
refuse("unknown_key", 401, "this key is not known here", { ["www-authenticate"] = "Bearer" })
refuse("too_large", 413, "the body is too large")
refuse("no_json", 415, "send the body as application/json")
refuse("used_up", 429, "this key has used up its requests per minute", { ["retry-after"] = "60" })
