-- KBTP, the KV Cache Block Transfer Protocol, on top of Wireshark's own iWARP dissectors.
--
-- Layouts are those of draft 5 and profile 2, numbers those of profile 1. The Sends of a frame are looked at when
-- Wireshark's dissectors are through with it, from the ULPDUs that they found: they hand on no more than one Send a
-- frame, and a batch of requests is many. What they do hand on is taken from them, so that no other dissector claims
-- it. FPDUs with markers are left alone.

set_plugin_info({
    version = "0.1.0",
    description = "KV Cache Block Transfer Protocol over RDMA",
})

local kbtp = Proto("kbtp", "KV Cache Block Transfer Protocol")

-- Registries (profile 1).

local HELLO, HELLO_ACK, LOAD, STORE, ALLOC_STORE, FREE, BIND, COMPLETION = 1, 2, 3, 4, 5, 6, 7, 8
local OPCODES = {
    [HELLO] = "HELLO",
    [HELLO_ACK] = "HELLO_ACK",
    [LOAD] = "LOAD",
    [STORE] = "STORE",
    [ALLOC_STORE] = "ALLOC_STORE",
    [FREE] = "FREE",
    [BIND] = "BIND",
    [COMPLETION] = "COMPLETION",
}
local SUCCESS = 0
local STATUSES = {
    [SUCCESS] = "SUCCESS",
    [1] = "NOT_BOUND",
    [2] = "NOT_SEALED",
    [3] = "SEALED",
    [4] = "ALREADY_BOUND",
    [5] = "GENERATION_MISMATCH",
    [6] = "HANDLE_OUT_OF_RANGE",
    [7] = "LENGTH_ERROR",
    [8] = "NO_SPACE",
    [9] = "TICKET_ABANDONED",
    [10] = "TICKET_MISMATCH",
    [11] = "MALFORMED",
    [12] = "UNSUPPORTED",
    [13] = "ACCESS_DENIED",
    [14] = "NO_SESSION",
    [15] = "TARGET_ERROR",
}
local INLINE, SEAL, RECORD, INVALIDATE, ALLOW_UNSEALED = 0x0001, 0x0002, 0x0004, 0x0008, 0x0010
local RESUMED = 0x0001
local FLAGS_ALLOWED = {
    [HELLO] = 0,
    [HELLO_ACK] = RESUMED,
    [LOAD] = RECORD + INVALIDATE + ALLOW_UNSEALED,
    [STORE] = INLINE + SEAL + RECORD + INVALIDATE,
    [ALLOC_STORE] = INLINE + SEAL + RECORD + INVALIDATE,
    [FREE] = RECORD,
    [BIND] = SEAL + RECORD,
    [COMPLETION] = 0,
}
local FIXED_BYTES = {
    [HELLO] = 64,
    [HELLO_ACK] = 152,
    [LOAD] = 40,
    [STORE] = 40,
    [ALLOC_STORE] = 40,
    [FREE] = 24,
    [BIND] = 40,
    [COMPLETION] = 40,
}
local RESPONSES = { [HELLO_ACK] = true, [COMPLETION] = true }
local NAME, NAMESPACE, AUTH = 1, 2, 3
local OPTIONS = { [NAME] = "NAME", [NAMESPACE] = "NAMESPACE", [AUTH] = "AUTH" }
local BYTE_ORDERS = { [0] = "little endian", [1] = "big endian" }
local HEADER_BYTES, COMPLETION_DESCRIPTOR_BYTES, HELLO_MAX_BYTES, CONNECTION_DATA_BYTES = 24, 16, 1024, 24
local OPTION_HEADER_BYTES, AUTH_BYTES, NAME_BYTES_MAX = 4, 36, 255
local SKIPPED_OPTIONS = 0x8000

-- Fields. What a message has is listed once, in the order of its octets.

local f = kbtp.fields

local function field(name, kind, title, ...)
    f[name] = ProtoField[kind]("kbtp." .. name, title, ...)
    return name
end

local function flag(name, title, mask, width)
    f[name] = ProtoField.bool("kbtp." .. name, title, width, { "set", "not set" }, mask)
    return { name, mask }
end

field("version", "uint8", "Version", base.DEC)
field("opcode", "uint8", "Opcode", base.DEC, OPCODES)
field("flags", "uint16", "Flags", base.HEX)
field("request_id", "uint64", "Request ID", base.DEC)
field("handle", "uint64", "Block Handle", base.HEX)
field("generation", "uint16", "Generation", base.DEC)
field("status", "uint16", "Status", base.DEC, STATUSES)

local REQUEST_FLAGS = {
    flag("flags.inline", "INLINE", INLINE, 16),
    flag("flags.seal", "SEAL", SEAL, 16),
    flag("flags.record", "RECORD", RECORD, 16),
    flag("flags.invalidate", "INVALIDATE", INVALIDATE, 16),
    flag("flags.allow_unsealed", "ALLOW_UNSEALED", ALLOW_UNSEALED, 16),
}
local HELLO_ACK_FLAGS = { flag("flags.resumed", "RESUMED", RESUMED, 16) }

field("features", "uint32", "Features", base.HEX)
local FEATURES = {
    flag("features.record_completion", "RECORD_COMPLETION", 0x01, 32),
    flag("features.direct_load", "DIRECT_LOAD", 0x02, 32),
    flag("features.direct_alloc", "DIRECT_ALLOC", 0x04, 32),
    flag("features.masked_atomics", "MASKED_ATOMICS", 0x08, 32),
    flag("features.invalidate", "INVALIDATE", 0x10, 32),
}

-- { octets, field }; false for reserved octets.
local DATA_DESCRIPTOR = {
    { 4, field("data.stag", "uint32", "STag", base.HEX) },
    { 8, field("data.to", "uint64", "Tagged Offset", base.HEX) },
    { 4, field("data.length", "uint32", "Length", base.DEC) },
}
local COMPLETION_DESCRIPTOR = {
    { 4, field("completion.stag", "uint32", "STag", base.HEX) },
    { 8, field("completion.to", "uint64", "Tagged Offset", base.HEX) },
    { 4, false },
}
local BIND_BODY = {
    { 4, field("ticket", "uint32", "Ticket", base.DEC) },
    { 4, field("data_length", "uint32", "Data Length", base.DEC) },
    { 8, field("block_offset", "uint64", "Block Offset", base.HEX) },
}
local COMPLETION_BODY = { { 4, "data_length" }, { 4, false }, { 8, "block_offset" } }
local HELLO_BODY = {
    { 4, "features" },
    { 4, field("requested_quota", "uint32", "Requested Quota", base.DEC) },
    { 8, field("requested_handles", "uint64", "Requested Handles", base.DEC) },
    { 4, field("completion_credits", "uint32", "Completion Credits", base.DEC) },
    { 4, field("max_message", "uint32", "Max Message", base.DEC) },
    { 16, field("initiator_id", "bytes", "Initiator ID") },
}
local HELLO_ACK_BODY = {
    { 4, "features" },
    { 4, field("block_size", "uint32", "Block Size", base.DEC) },
    { 4, field("pool_blocks", "uint32", "Pool Blocks", base.DEC) },
    { 4, field("allocation_quota", "uint32", "Allocation Quota", base.DEC) },
    { 4, field("request_credits", "uint32", "Request Credits", base.DEC) },
    { 4, "max_message" },
    { 4, field("ticket_timeout_ms", "uint32", "Ticket Timeout (ms)", base.DEC) },
    { 1, field("ring_order", "uint8", "Ring Order", base.DEC) },
    { 1, field("counter_byte_order", "uint8", "Counter Byte Order", base.DEC, BYTE_ORDERS) },
    { 2, false },
    { 8, field("incarnation", "uint64", "Incarnation", base.HEX) },
    { 8, field("first_handle", "uint64", "First Handle", base.HEX) },
    { 8, field("handle_count", "uint64", "Handle Count", base.DEC) },
    { 8, field("table_base_handle", "uint64", "Table Base Handle", base.HEX) },
    { 8, field("table_handles", "uint64", "Table Handles", base.DEC) },
    { 8, field("table_offset", "uint64", "Table Offset", base.HEX) },
    { 4, field("table_stag", "uint32", "Table STag", base.HEX) },
    { 4, field("pool_stag", "uint32", "Pool STag", base.HEX) },
    { 4, field("partition_stag", "uint32", "Partition STag", base.HEX) },
    { 4, field("ring_stag", "uint32", "Ring STag", base.HEX) },
    { 8, field("ring_offset", "uint64", "Ring Offset", base.HEX) },
    { 8, field("head_offset", "uint64", "Head Offset", base.HEX) },
    { 4, field("head_stag", "uint32", "Head STag", base.HEX) },
    { 4, field("bound_blocks", "uint32", "Bound Blocks", base.DEC) },
    { 8, field("pool_base", "uint64", "Pool Base", base.HEX) },
}

field("inline_data", "bytes", "Inline data")
field("option.type", "uint16", "Type", base.DEC, OPTIONS)
field("option.length", "uint16", "Length", base.DEC)
field("option.value", "bytes", "Value")
field("name", "string", "Name", base.UNICODE)
field("namespace", "bytes", "Namespace")
field("auth.key_id", "uint32", "Key ID", base.DEC)
field("auth.mac", "bytes", "MAC")
field("connection.version", "uint8", "Version", base.DEC)
field("connection.nonce", "bytes", "Nonce")
field("request", "uint8", "Answers", base.DEC, OPCODES)
f["response_in"] = ProtoField.framenum("kbtp.response_in", "Response in", base.NONE, frametype.RESPONSE)
f["response_to"] = ProtoField.framenum("kbtp.response_to", "Response to", base.NONE, frametype.REQUEST)
field("time", "relative_time", "Time from request")

local malformed = ProtoExpert.new("kbtp.malformed", "Malformed", expert.group.MALFORMED, expert.severity.ERROR)
local unsupported = ProtoExpert.new("kbtp.unsupported", "Unsupported", expert.group.UNDECODED, expert.severity.WARN)
local length_error = ProtoExpert.new("kbtp.length_error", "Wrong length", expert.group.PROTOCOL, expert.severity.WARN)
local refused = ProtoExpert.new("kbtp.refused", "Refused", expert.group.RESPONSE_CODE, expert.severity.NOTE)
local out_of_turn = ProtoExpert.new("kbtp.out_of_turn", "Out of turn", expert.group.SEQUENCE, expert.severity.WARN)
kbtp.experts = { malformed, unsupported, length_error, refused, out_of_turn }

-- What Wireshark's own dissectors have found in a frame.

local tcp_stream = Field.new("tcp.stream")
local rdmap_opcode = Field.new("iwarp_rdma.opcode")
local ulpdu_length = Field.new("iwarp_mpa.ulpdulength")
local marker = Field.new("iwarp_mpa.marker_fpduptr")
local private_data = Field.new("iwarp_mpa.privatedata")

-- RFC 5040 4.1 and RFC 5041 4: the opcodes of the four Sends, and the header of an untagged segment.
local SENDS = { [3] = true, [4] = true, [5] = true, [6] = true }
local TAGGED, LAST = 0x80, 0x40
local UNTAGGED_HEADER_BYTES, LENGTH_BYTES = 18, 2

-- What is remembered between frames.

local streams -- by tcp.stream: whether it is KBTP, whether it is seen from its start, and by end what is not finished
local answers -- of each request and completion, by frame and Request ID: the other one, found when it came
local wholes -- messages of several segments, by the frame of the last and its MSN

function kbtp.init()
    streams, answers, wholes = {}, {}, {}
end

local function stream_of_frame()
    local number = tcp_stream() and tcp_stream().value or -1
    if streams[number] == nil then
        streams[number] = { is_kbtp = false, from_start = false, outstanding = {}, begun = {} }
    end
    return streams[number]
end

-- What is wrong with a message (profile 1, 2, 8.1), in the order in which a target looks.

local function has(flags, mask)
    return math.floor(flags / mask) % 2 == 1
end

local function option_fault(tvb, at)
    local seen = {}
    while at < tvb:len() do
        if tvb:len() - at < OPTION_HEADER_BYTES then
            return "an option's type and length are not all there"
        end
        local kind, length = tvb(at, 2):uint(), tvb(at + 2, 2):uint()
        local padded = OPTION_HEADER_BYTES + math.ceil(length / 4) * 4
        if at + padded > tvb:len() then
            return string.format("option %d is longer than the message", kind)
        elseif seen[kind] then
            return string.format("option %d is there twice", kind)
        elseif (kind == NAME or kind == NAMESPACE) and length > NAME_BYTES_MAX then
            return string.format("option %d has %d octets, at most %d", kind, length, NAME_BYTES_MAX)
        elseif kind == AUTH and (length ~= AUTH_BYTES or at + padded < tvb:len()) then
            return "AUTH has 36 octets and is the last option"
        end
        seen[kind] = true
        at = at + padded
    end
end

local function hello_fault(tvb, opcode, fixed)
    if tvb:len() > HELLO_MAX_BYTES then
        return string.format("%d octets, at most %d", tvb:len(), HELLO_MAX_BYTES)
    end
    -- The smallest counts: Completion Credits or Request Credits, then Max Message.
    if (opcode == HELLO or tvb(22, 2):uint() == SUCCESS) and tvb(40, 4):uint() == 0 then
        return "0 credits, at least 1"
    elseif (opcode == HELLO or tvb(22, 2):uint() == SUCCESS) and tvb(44, 4):uint() < HELLO_MAX_BYTES then
        return string.format("Max Message %d, at least %d", tvb(44, 4):uint(), HELLO_MAX_BYTES)
    end
    return option_fault(tvb, fixed)
end

local function fixed_bytes(opcode, flags)
    local record = not RESPONSES[opcode] and opcode ~= HELLO and has(flags, RECORD)
    return FIXED_BYTES[opcode] + (record and COMPLETION_DESCRIPTOR_BYTES or 0)
end

-- The expert item and what it says, or nil.
local function fault_of(tvb)
    if tvb:len() < HEADER_BYTES then
        return malformed, string.format("%d octets, the common header has %d", tvb:len(), HEADER_BYTES)
    end
    local version, opcode, flags = tvb(0, 1):uint(), tvb(1, 1):uint(), tvb(2, 2):uint()
    if version ~= 1 then
        return unsupported, string.format("version %d", version)
    elseif OPCODES[opcode] == nil then
        return unsupported, string.format("opcode %d", opcode)
    end
    for bit = 0, 15 do
        if has(flags, 2 ^ bit) and not has(FLAGS_ALLOWED[opcode], 2 ^ bit) then
            return unsupported, string.format("flag 0x%04x in %s", 2 ^ bit, OPCODES[opcode])
        end
    end
    local stores = opcode == STORE or opcode == ALLOC_STORE
    local inline = stores and has(flags, INLINE)
    if (stores or opcode == LOAD) and has(flags, INVALIDATE) and (inline or has(flags, RECORD)) then
        return unsupported, "INVALIDATE with INLINE or RECORD"
    end
    local fixed = fixed_bytes(opcode, flags)
    if tvb:len() < fixed then
        return malformed, string.format("%d octets, %s has %d", tvb:len(), OPCODES[opcode], fixed)
    elseif opcode == HELLO or opcode == HELLO_ACK then
        local words = hello_fault(tvb, opcode, fixed)
        return words and malformed, words
    elseif inline and tvb(36, 4):uint() ~= tvb:len() - fixed then
        return length_error, string.format("Length %d, %d octets follow", tvb(36, 4):uint(), tvb:len() - fixed)
    elseif not inline and tvb:len() > fixed then
        return malformed, string.format("%d octets, %s has %d", tvb:len(), OPCODES[opcode], fixed)
    end
end

-- Requests and their completions.

local function end_of(address, port)
    return tostring(address) .. " " .. port
end

local function key_of(pinfo, tvb)
    return string.format("%d %s %s", pinfo.number, end_of(pinfo.src, pinfo.src_port), tvb(4, 8):bytes():tohex())
end

local function outstanding_of(stream, address, port)
    local from = end_of(address, port)
    stream.outstanding[from] = stream.outstanding[from] or {}
    return stream.outstanding[from]
end

-- On the first pass over a frame: who answers whom.
local function match(stream, tvb, pinfo)
    local id, key = tvb(4, 8):bytes():tohex(), key_of(pinfo, tvb)
    local opcode = tvb(1, 1):uint()
    if not RESPONSES[opcode] then
        local outstanding = outstanding_of(stream, pinfo.src, pinfo.src_port)
        answers[key] = { repeated = outstanding[id] ~= nil and outstanding[id].frame }
        outstanding[id] = { frame = pinfo.number, time = pinfo.rel_ts, opcode = opcode, key = key }
        return
    end
    local outstanding = outstanding_of(stream, pinfo.dst, pinfo.dst_port)
    local request = outstanding[id]
    outstanding[id] = nil
    answers[key] = { request = request, unasked = request == nil and stream.from_start }
    if request ~= nil then
        answers[request.key].response_in = pinfo.number
    end
end

local function seconds(value)
    local whole = math.floor(value)
    return NSTime.new(whole, math.floor((value - whole) * 1e9 + 0.5))
end

local function show_match(tree, tvb, pinfo)
    local answer = answers[key_of(pinfo, tvb)]
    if answer == nil then
        return nil
    end
    if answer.response_in then
        tree:add(f.response_in, answer.response_in):set_generated()
    end
    if answer.repeated then
        local words = string.format("Request ID is that of the request in frame %d, not yet answered", answer.repeated)
        tree:add_proto_expert_info(out_of_turn, words)
    elseif answer.unasked then
        tree:add_proto_expert_info(out_of_turn, "it answers no request")
    end
    local request = answer.request
    if request then
        tree:add(f.request, request.opcode):set_generated()
        tree:add(f.response_to, request.frame):set_generated()
        tree:add(f.time, seconds(pinfo.rel_ts - request.time)):set_generated()
    end
    return request
end

-- The tree.

local function add_flags(tree, name, range, flags)
    local item, names = tree:add(f[name], range), {}
    for _, one in ipairs(flags) do
        item:add(f[one[1]], range)
        if has(range:uint(), one[2]) then
            table.insert(names, (one[1]:match("%.(.*)$"):upper()))
        end
    end
    if #names > 0 then
        item:append_text(" (" .. table.concat(names, ", ") .. ")")
    end
end

local function add_body(tree, tvb, at, body)
    for _, part in ipairs(body) do
        local octets, name = part[1], part[2]
        if name == "features" then
            add_flags(tree, name, tvb(at, octets), FEATURES)
        elseif name then
            tree:add(f[name], tvb(at, octets))
        end
        at = at + octets
    end
    return at
end

local function add_descriptor(tree, tvb, at, title, body)
    local octets = body == DATA_DESCRIPTOR and 16 or COMPLETION_DESCRIPTOR_BYTES
    return add_body(tree:add(kbtp, tvb(at, octets), title), tvb, at, body)
end

local function add_options(tree, tvb, at)
    while at + OPTION_HEADER_BYTES <= tvb:len() do
        local kind, length = tvb(at, 2):uint(), tvb(at + 2, 2):uint()
        local value_at = at + OPTION_HEADER_BYTES
        local there = math.min(length, tvb:len() - value_at)
        local option = tree:add(kbtp, tvb(at, OPTION_HEADER_BYTES + there), "Option: " .. (OPTIONS[kind] or kind))
        option:add(f["option.type"], tvb(at, 2))
        option:add(f["option.length"], tvb(at + 2, 2))
        if kind >= SKIPPED_OPTIONS then
            option:append_text(" (skipped)")
        elseif OPTIONS[kind] == nil then
            option:add_proto_expert_info(unsupported, string.format("option %d", kind))
        end
        if kind == AUTH and there == AUTH_BYTES then
            option:add(f["auth.key_id"], tvb(value_at, 4))
            option:add(f["auth.mac"], tvb(value_at + 4, AUTH_BYTES - 4))
        elseif there > 0 then
            local name = kind == NAME and "name" or kind == NAMESPACE and "namespace" or "option.value"
            option:add(f[name], tvb(value_at, there))
        end
        at = value_at + math.ceil(length / 4) * 4
    end
end

local function add_message(tree, tvb, opcode, flags)
    local at = HEADER_BYTES
    if opcode == HELLO then
        add_options(tree, tvb, add_body(tree, tvb, at, HELLO_BODY))
    elseif opcode == HELLO_ACK then
        add_options(tree, tvb, add_body(tree, tvb, at, HELLO_ACK_BODY))
    elseif opcode == COMPLETION then
        add_body(tree, tvb, at, COMPLETION_BODY)
    else
        if opcode == BIND then
            at = add_body(tree, tvb, at, BIND_BODY)
        elseif opcode ~= FREE then
            at = add_descriptor(tree, tvb, at, "Data Descriptor", DATA_DESCRIPTOR)
        end
        if has(flags, RECORD) then
            at = add_descriptor(tree, tvb, at, "Completion Descriptor", COMPLETION_DESCRIPTOR)
        end
        if at < tvb:len() then
            tree:add(f.inline_data, tvb(at))
        end
    end
end

local function summary(tvb, request)
    local opcode, status = tvb(1, 1):uint(), tvb(22, 2):uint()
    local words = { OPCODES[opcode] or ("opcode " .. opcode), "id=" .. tostring(tvb(4, 8):uint64()) }
    if opcode ~= HELLO and opcode ~= HELLO_ACK then
        table.insert(words, "handle=0x" .. tvb(12, 8):uint64():tohex():lower())
        table.insert(words, "generation=" .. tvb(20, 2):uint())
    end
    if RESPONSES[opcode] then
        table.insert(words, STATUSES[status] or ("status " .. status))
    end
    if request then
        table.insert(words, "(" .. OPCODES[request.opcode] .. ")")
    end
    return table.concat(words, " ")
end

-- Adds the message to the tree; what to say of it in a line.
local function show(stream, tvb, pinfo, tree)
    local expert_item, words = fault_of(tvb)
    local item = tree:add(kbtp, tvb())
    if tvb:len() < HEADER_BYTES then
        item:add_proto_expert_info(expert_item, words)
        return "KBTP [" .. words .. "]"
    end
    local opcode, flags, status = tvb(1, 1):uint(), tvb(2, 2):uint(), tvb(22, 2):uint()
    if not pinfo.visited and OPCODES[opcode] then
        match(stream, tvb, pinfo)
    end
    item:add(f.version, tvb(0, 1))
    item:add(f.opcode, tvb(1, 1))
    if opcode == HELLO_ACK then
        add_flags(item, "flags", tvb(2, 2), HELLO_ACK_FLAGS)
    else
        add_flags(item, "flags", tvb(2, 2), (opcode == HELLO or opcode == COMPLETION) and {} or REQUEST_FLAGS)
    end
    item:add(f.request_id, tvb(4, 8))
    item:add(f.handle, tvb(12, 8))
    item:add(f.generation, tvb(20, 2))
    local status_item = item:add(f.status, tvb(22, 2))
    if RESPONSES[opcode] and status ~= SUCCESS then
        status_item:add_proto_expert_info(refused, STATUSES[status] or string.format("status %d", status))
    end
    if OPCODES[opcode] and tvb:len() >= fixed_bytes(opcode, flags) then
        add_message(item, tvb, opcode, flags)
    end
    if expert_item then
        item:add_proto_expert_info(expert_item, words)
    end
    local request = show_match(item, tvb, pinfo)
    local said = summary(tvb, request)
    item:append_text(", " .. said)
    return expert_item and said .. " [" .. words .. "]" or said
end

-- Messages from segments (RFC 5041 5.2).

-- The message that the untagged segment `ulpdu` completes, if it does.
local function message_of(stream, pinfo, ulpdu)
    local msn, offset = ulpdu(10, 4):uint(), ulpdu(14, 4):uint()
    local last = has(ulpdu(0, 1):uint(), LAST)
    local payload_bytes = ulpdu:len() - UNTAGGED_HEADER_BYTES
    if payload_bytes == 0 and msn == 1 then
        return nil -- the RTR of RFC 6581 5.1, which is no message
    elseif last and offset == 0 then
        return payload_bytes > 0 and ulpdu(UNTAGGED_HEADER_BYTES):tvb() or ByteArray.new():tvb("Empty Send")
    end
    local from, place = end_of(pinfo.src, pinfo.src_port), pinfo.number .. " " .. msn
    if not pinfo.visited then
        local begun = stream.begun[from]
        if begun == nil or begun.msn ~= msn or offset == 0 then
            begun = { msn = msn, octets = ByteArray.new() }
            stream.begun[from] = begun
        end
        begun.octets:append(ulpdu(UNTAGGED_HEADER_BYTES):bytes())
        if last then
            wholes[place], stream.begun[from] = begun.octets, nil
        end
    end
    return last and wholes[place] and wholes[place]:tvb("Reassembled KBTP message") or nil
end

local function show_sends(stream, pinfo, tree)
    local said = {}
    for _, length in ipairs({ ulpdu_length() }) do
        local ulpdu = length.source(length.offset + LENGTH_BYTES, length.value):tvb()
        local is_send = ulpdu:len() >= UNTAGGED_HEADER_BYTES
            and not has(ulpdu(0, 1):uint(), TAGGED)
            and SENDS[ulpdu(1, 1):uint() % 16]
        local message = is_send and message_of(stream, pinfo, ulpdu)
        if message then
            table.insert(said, show(stream, message, pinfo, tree))
        end
    end
    if #said > 0 then
        pinfo.cols.protocol = "KBTP"
        pinfo.cols.info = table.concat(said, " | ")
    end
end

-- Connection data (profile 3): private data of MPA Request and Reply; RFC 6581 puts four octets of its own before it.
local function show_connection_data(stream, found, tree)
    for _, at in ipairs({ 0, 4 }) do
        if found.range:len() >= at + CONNECTION_DATA_BYTES and found.range(at, 4):string() == "KBTP" then
            stream.is_kbtp, stream.from_start = true, true
            local item = tree:add(kbtp, found.range(at, CONNECTION_DATA_BYTES), "KBTP connection data")
            item:add(f["connection.version"], found.range(at + 4, 1))
            item:add(f["connection.nonce"], found.range(at + 8, 16))
            return
        end
    end
end

-- After Wireshark's own dissectors.
function kbtp.dissector(_, pinfo, tree)
    local data, length = private_data(), ulpdu_length()
    if data then
        show_connection_data(stream_of_frame(), data, tree)
    elseif length and not marker() and stream_of_frame().is_kbtp then
        show_sends(stream_of_frame(), pinfo, tree)
    end
end

register_postdissector(kbtp)

-- Among them: what they hand on is KBTP's, if the stream is, or if it looks like a message without a fault.
kbtp:register_heuristic("iwarp_ddp_rdmap", function(tvb)
    local opcodes = { rdmap_opcode() }
    if #opcodes == 0 or not SENDS[opcodes[#opcodes].value] then
        return false
    end
    local stream = stream_of_frame()
    stream.is_kbtp = stream.is_kbtp or not fault_of(tvb)
    return stream.is_kbtp
end)
