# The wire format of the `world` protocol (docs/protocol.md): binary frames taken apart, messages put together.
# Knows no socket and no screen, and keeps to what Godot 3 and Godot 4 both understand.
#
# One binary frame: | header length, 4 bytes, big endian | header, UTF-8 JSON | payload |
extends Object


# Returns the header of a frame as JSON text; parse it with the JSON of your version of Godot.
static func header_text(frame):
	var reader = _reader(frame)
	return reader.get_utf8_string(_header_bytes(reader))


# Returns the payload of a frame.
static func payload(frame):
	var reader = _reader(frame)
	var header_bytes = _header_bytes(reader)
	reader.seek(4 + header_bytes)
	return reader.get_data(reader.get_available_bytes())[1]


# Formats `h264` and `jpeg`: returns frame by frame what `sizes` of the header cuts the payload into.
static func samples(header, bytes):
	var reader = _reader(bytes)
	var found = []
	for size in header["sizes"]:
		found.append(reader.get_data(int(size))[1])
	return found


# Format `rgb24`: returns the pictures, each width * height * 3 bytes, rows from top to bottom.
static func pictures(header, bytes):
	var shape = header["shape"]
	var picture_bytes = int(shape[1]) * int(shape[2]) * int(shape[3])
	var reader = _reader(bytes)
	var found = []
	for _frame in range(int(shape[0])):
		found.append(reader.get_data(picture_bytes)[1])
	return found


static func applied_events(header):
	var ids = []
	for applied in header["applied"]:
		ids.append(int(applied["event_id"]))
	return ids


# ------------------------------------------------------------ messages


static func start(prompt, image_name, format, seed_):
	return {
		"type": "session.start", "protocol": 1, "prompt": prompt, "image": {"name": image_name},
		"format": format, "seed": seed_,
	}


static func resume(resume_token, last_chunk_index, run):
	return {
		"type": "session.start", "protocol": 1, "resume_token": resume_token,
		"last_chunk_index": last_chunk_index, "run": run,
	}


# Holds exactly these keys from the next chunk on: w a s d walk, i j k l look.
static func hold(event_id, keys):
	var data = {"mode": "state", "held": keys}
	var control = {"track": "camera", "schema": "lingbot.camera_actions.v1", "data": data}
	return {"type": "session.event", "event_id": event_id, "controls": [control]}


# Tells that the first picture of a chunk is on screen. The epoch is that of the connection.
static func playback(epoch, header, buffered_ms):
	return {
		"type": "playback", "epoch": int(epoch), "run": int(header["run"]),
		"chunk_index": int(header["chunk_index"]), "buffered_ms": buffered_ms,
	}


static func _reader(bytes):
	var reader = StreamPeerBuffer.new()
	reader.big_endian = true
	reader.data_array = bytes
	return reader


static func _header_bytes(reader):
	return reader.get_u32()
