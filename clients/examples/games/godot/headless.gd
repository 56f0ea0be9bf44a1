# The client without a window, for Godot 3: `godot3-server --script headless.gd ARGUMENTS`.
#
#     FILE                                              one binary frame from a file
#     URL PROMPT IMAGE FORMAT SEED CHUNKS [PING_MS]     so many chunks; then a key, a lost link, a close
extends SceneTree

const Link = preload("world_link.gd")
const Wire = preload("world_wire.gd")
const GIVE_UP_MS = 60000

var _socket
var _url
var _started
var _wanted
var _last_chunk_index = -1
var _step = "walk"
var _resume
var _link = Link.new()
var _began_ms = OS.get_ticks_msec()


func _init():
	var arguments = OS.get_cmdline_args()
	arguments = Array(arguments).slice(Array(arguments).find("--script") + 2, arguments.size())
	if arguments.size() == 1:
		_parse_file(arguments[0])
		quit()
		return
	_url = arguments[0]
	_wanted = int(arguments[5])
	if arguments.size() > 6:
		_link.ping_ms = int(arguments[6])
	_connect(Wire.start(arguments[1], arguments[2], arguments[3], int(arguments[4])))


func _parse_file(path):
	var file = File.new()
	file.open(path, File.READ)
	var frame = file.get_buffer(file.get_len())
	file.close()
	_print_chunk(parse_json(Wire.header_text(frame)), Wire.payload(frame))


func _connect(start):
	_link.opened(OS.get_ticks_msec())
	_socket = WebSocketClient.new()
	# In KiB: room for chunks of raw pictures.
	_socket.set_buffers(65536, 1024, 256, 1024)
	_socket.connect("connection_established", self, "_on_connected", [start])
	_socket.connect("data_received", self, "_on_data")
	_socket.connect("connection_error", self, "_give_up", ["cannot connect"])
	_socket.connect_to_url(_url)


func _idle(_delta):
	if _socket != null:
		_socket.poll()
	if _started != null and _resume == null:
		_watch_link(OS.get_ticks_msec())
	if _resume != null:
		var resume = _resume
		_resume = null
		_connect(resume)
	if OS.get_ticks_msec() - _began_ms > GIVE_UP_MS:
		_give_up("it took too long")
	return false


func _watch_link(now_ms):
	if _link.is_lost(now_ms):
		_resume = Wire.resume(_started["resume_token"], _last_chunk_index, _started["run"])
		return
	var ping = _link.due_ping(now_ms)
	if ping != null:
		_send(ping)


func _on_connected(_protocol, start):
	_link.opened(OS.get_ticks_msec())
	_socket.get_peer(1).set_write_mode(WebSocketPeer.WRITE_MODE_TEXT)
	_send(start)


func _on_data():
	if _resume != null:
		# This socket is given up; the next one brings these frames again.
		return
	_link.heard(OS.get_ticks_msec())
	var packet = _socket.get_peer(1).get_packet()
	if _socket.get_peer(1).was_string_packet():
		_on_message(parse_json(packet.get_string_from_utf8()))
	else:
		_on_chunk(parse_json(Wire.header_text(packet)), Wire.payload(packet))


func _on_message(message):
	match message["type"]:
		"session.started":
			_started = message
			if int(message["epoch"]) > 1:
				print("resumed ", int(message["epoch"]))
			for event in _link.unanswered():
				_send(event)
		"event.queued":
			_link.answered(message)
		"session.closed":
			print("closed ", message["reason"])
			quit()
		"error":
			_give_up(message["code"])


func _on_chunk(header, bytes):
	if header["kind"] == "init":
		return
	var index = int(header["chunk_index"])
	if index != _last_chunk_index + 1:
		_give_up("chunk %d after %d" % [index, _last_chunk_index])
	_last_chunk_index = index
	if _step == "walk":
		_print_chunk(header, bytes)
		if index + 1 == _wanted:
			_step = "hold"
			var event = Wire.hold(0, ["w", "l"])
			_link.sent(event)
			_send(event)
	elif _step == "hold" and 0 in Wire.applied_events(header):
		print("applied 0")
		_step = "resumed"
		# Not here: the socket must not be freed while it hands out this frame.
		_resume = Wire.resume(_started["resume_token"], index, header["run"])
		return
	elif _step == "resumed":
		_step = "closing"
		_send({"type": "session.close"})
	_send(Wire.playback(_started["epoch"], header, 0))


func _print_chunk(header, bytes):
	var parts = Wire.pictures(header, bytes) if header.has("shape") else Wire.samples(header, bytes)
	var digests = PoolStringArray()
	for part in parts:
		var hashing = HashingContext.new()
		hashing.start(HashingContext.HASH_SHA256)
		hashing.update(part)
		digests.append(hashing.finish().hex_encode().substr(0, 16))
	print("chunk ", int(header["chunk_index"]), " ", digests.join(" "))


func _finalize():
	_link.free()


func _send(message):
	_socket.get_peer(1).put_packet(to_json(message).to_utf8())


func _give_up(reason):
	printerr("gave up: ", reason)
	quit(1)
