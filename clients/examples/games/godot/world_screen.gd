# Godot 4: shows a world on this TextureRect and steers it with W A S D and I J K L.
# Format rgb24, which needs no decoder: 19 MB/s at 832x480. Resumes after a lost link.
extends TextureRect

const Link = preload("world_link.gd")
const Wire = preload("world_wire.gd")
const KEYS = {
	KEY_W: "w", KEY_A: "a", KEY_S: "s", KEY_D: "d", KEY_I: "i", KEY_J: "j", KEY_K: "k", KEY_L: "l",
}
const RESUME_DELAYS_S = [0.25, 1.0, 2.0, 4.0]

@export var address := "ws://127.0.0.1:8000/v1/world"
@export var token := ""
@export var prompt := "a small town, day"
@export var image_name := "day"

var _socket: WebSocketPeer
var _link := Link.new()
var _started := {}
var _run := 0
var _last_chunk_index := -1
var _frames: Array[Dictionary] = []
var _next_event_id := 0
var _held: Array[String] = []
var _is_said := false
var _until_next_s := 0.0
var _until_retry_s := 0.0
var _num_retries := 0
var _is_over := false


func _ready() -> void:
	_connect()


func _process(delta: float) -> void:
	if _is_over:
		return
	_socket.poll()
	match _socket.get_ready_state():
		WebSocketPeer.STATE_OPEN:
			_read()
			_watch_link(Time.get_ticks_msec())
			_steer()
		WebSocketPeer.STATE_CLOSED:
			_retry(delta)
	_until_next_s -= delta
	if _until_next_s <= 0.0 and not _frames.is_empty():
		_until_next_s = maxf(_until_next_s + 1.0 / float(_started["fps"]), 0.0)
		_show(_frames.pop_front())


func _connect() -> void:
	_socket = WebSocketPeer.new()
	# The default of 64 KiB is less than one chunk.
	_socket.inbound_buffer_size = 64 * 1024 * 1024
	if token != "":
		_socket.handshake_headers = PackedStringArray(["Authorization: Bearer " + token])
	_socket.connect_to_url(address)
	while _socket.get_ready_state() == WebSocketPeer.STATE_CONNECTING:
		_socket.poll()
		await get_tree().process_frame
	_link.opened(Time.get_ticks_msec())
	if _socket.get_ready_state() == WebSocketPeer.STATE_OPEN:
		if _started.is_empty():
			_send(Wire.start(prompt, image_name, "rgb24", randi()))
		else:
			_send(Wire.resume(_started["resume_token"], _last_chunk_index, _run))


func _retry(delta: float) -> void:
	var may_resume := not _started.is_empty() and _socket.get_close_code() in [-1, 1001, 1005, 1006, 1007, 1009]
	if not may_resume or _num_retries == RESUME_DELAYS_S.size():
		_is_over = true
		push_warning("the world is over: %d %s" % [_socket.get_close_code(), _socket.get_close_reason()])
		return
	_until_retry_s += delta
	if _until_retry_s >= RESUME_DELAYS_S[_num_retries]:
		_until_retry_s = 0.0
		_num_retries += 1
		_connect()


func _watch_link(now_ms: int) -> void:
	if _link.is_lost(now_ms):
		# A negative code waits for no answer.
		_socket.close(-1)
		return
	var ping = _link.due_ping(now_ms)
	if ping != null:
		_send(ping)


func _read() -> void:
	while _socket.get_available_packet_count() > 0:
		_link.heard(Time.get_ticks_msec())
		var packet := _socket.get_packet()
		if _socket.was_string_packet():
			_on_message(JSON.parse_string(packet.get_string_from_utf8()))
		else:
			_on_chunk(JSON.parse_string(Wire.header_text(packet)), Wire.payload(packet))


func _on_message(message: Dictionary) -> void:
	match message["type"]:
		"session.started":
			_started = message
			_num_retries = 0
			_set_run(int(message["run"]))
			for event in _link.unanswered():
				_send(event)
			# What is held now is said again, also if it is nothing: a key may have come up while there was no link.
			_is_said = false
		"session.state":
			_set_run(int(message["run"]))
		"event.queued":
			_link.answered(message)
		"error":
			_link.answered(message)
			push_warning("%s: %s" % [message["code"], message["message"]])


func _on_chunk(header: Dictionary, bytes: PackedByteArray) -> void:
	if int(header["run"]) == _run:
		_last_chunk_index = int(header["chunk_index"])
	var is_first := true
	for picture in Wire.pictures(header, bytes):
		_frames.append({"header": header, "picture": picture, "is_first": is_first})
		is_first = false


func _show(frame: Dictionary) -> void:
	var header: Dictionary = frame["header"]
	var width := int(_started["width"])
	var height := int(_started["height"])
	var shown := Image.create_from_data(width, height, false, Image.FORMAT_RGB8, frame["picture"])
	texture = ImageTexture.create_from_image(shown)
	if frame["is_first"] and int(header["epoch"]) == int(_started["epoch"]):
		var buffered_ms := 1000.0 * _frames.size() / float(_started["fps"])
		_send(Wire.playback(_started["epoch"], header, buffered_ms))


func _steer() -> void:
	if _started.is_empty():
		return
	var now: Array[String] = []
	for key in KEYS:
		if Input.is_physical_key_pressed(key):
			now.append(KEYS[key])
	if now != _held or not _is_said:
		_held = now
		_is_said = true
		var event := Wire.hold(_next_event_id, now) as Dictionary
		_link.sent(event)
		_send(event)
		_next_event_id += 1


func _set_run(run: int) -> void:
	if run != _run:
		_last_chunk_index = -1
	_run = run


func _send(message: Dictionary) -> void:
	_socket.send_text(JSON.stringify(message))


func _exit_tree() -> void:
	if not _is_over:
		_send({"type": "session.close"})
	_link.free()
