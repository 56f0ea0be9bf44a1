# What a client remembers of its link: whether it lives, and which events are to be sent again on the next one.
# Knows no socket and no clock, and keeps to what Godot 3 and Godot 4 both understand. Free it when you are done.
#
# A link can die without a word. So there is a ping every `ping_ms`, and a link on which nothing has come for twice
# that time is lost: what comes may be the pong or anything before it.
extends Object

var ping_ms = 5000

var _heard_ms = 0
var _pinged_ms = 0
var _unanswered = {}


# Begins a new link.
func opened(now_ms):
	_heard_ms = now_ms
	_pinged_ms = now_ms


# Notes that something has come.
func heard(now_ms):
	_heard_ms = now_ms


func is_lost(now_ms):
	return now_ms - _heard_ms > 2 * ping_ms


# Returns the ping to send now, or null.
func due_ping(now_ms):
	if now_ms - _pinged_ms < ping_ms:
		return null
	_pinged_ms = now_ms
	return {"type": "ping", "t": now_ms}


# Keeps an event until it is answered; their ids ascend.
func sent(event):
	_unanswered[int(event["event_id"])] = event


# Forgets the event that an `event.queued` or an `error` is about. What had arrived already is an error as well.
func answered(message):
	if message.get("event_id") != null:
		_unanswered.erase(int(message["event_id"]))


# Returns the events to send again after a resume, in order.
func unanswered():
	return _unanswered.values()
