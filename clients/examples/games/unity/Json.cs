// JSON as plain objects: Dictionary<string, object>, List<object>, string, double, bool and null.
// Unity's JsonUtility knows neither null nor maps, and this is all that the protocol needs.
using System;
using System.Collections.Generic;
using System.Globalization;
using System.Text;

namespace Worldserve
{
    public static class Json
    {
        public static Dictionary<string, object> ParseObject(string text)
        {
            var reader = new Reader(text);
            var value = reader.Value() as Dictionary<string, object>;
            reader.End();
            if (value == null) throw new FormatException("expected a JSON object");
            return value;
        }

        public static string Write(object value)
        {
            var text = new StringBuilder();
            Write(value, text);
            return text.ToString();
        }

        private static void Write(object value, StringBuilder text)
        {
            var word = value as string;
            var map = value as IDictionary<string, object>;
            var list = value as System.Collections.IEnumerable;
            if (value == null) text.Append("null");
            else if (word != null) WriteString(word, text);
            else if (value is bool) text.Append((bool)value ? "true" : "false");
            else if (map != null) WriteMap(map, text);
            else if (list != null) WriteList(list, text);
            else text.Append(Convert.ToString(value, CultureInfo.InvariantCulture));
        }

        private static void WriteMap(IDictionary<string, object> map, StringBuilder text)
        {
            var comma = "";
            text.Append('{');
            foreach (var entry in map)
            {
                text.Append(comma);
                WriteString(entry.Key, text);
                text.Append(':');
                Write(entry.Value, text);
                comma = ",";
            }
            text.Append('}');
        }

        private static void WriteList(System.Collections.IEnumerable list, StringBuilder text)
        {
            var comma = "";
            text.Append('[');
            foreach (var item in list)
            {
                text.Append(comma);
                Write(item, text);
                comma = ",";
            }
            text.Append(']');
        }

        private static void WriteString(string word, StringBuilder text)
        {
            text.Append('"');
            foreach (var letter in word)
            {
                if (letter == '"' || letter == '\\') text.Append('\\').Append(letter);
                else if (letter < ' ') text.Append("\\u").Append(((int)letter).ToString("x4"));
                else text.Append(letter);
            }
            text.Append('"');
        }

        private sealed class Reader
        {
            private readonly string text;
            private int at;

            public Reader(string text) { this.text = text; }

            public void End()
            {
                Space();
                if (at != text.Length) throw Wrong("the end");
            }

            public object Value()
            {
                Space();
                switch (at < text.Length ? text[at] : '\0')
                {
                    case '{': return Map();
                    case '[': return List();
                    case '"': return String();
                    case 't': return Word("true", true);
                    case 'f': return Word("false", false);
                    case 'n': return Word("null", null);
                    default: return Number();
                }
            }

            private Dictionary<string, object> Map()
            {
                var map = new Dictionary<string, object>();
                at++;
                while (!Closes('}', map.Count))
                {
                    Space();
                    var key = String();
                    Space();
                    Take(':');
                    map[key] = Value();
                }
                return map;
            }

            private List<object> List()
            {
                var list = new List<object>();
                at++;
                while (!Closes(']', list.Count)) list.Add(Value());
                return list;
            }

            private bool Closes(char bracket, int count)
            {
                Space();
                if (at < text.Length && text[at] == bracket)
                {
                    at++;
                    return true;
                }
                if (count > 0) Take(',');
                return false;
            }

            private string String()
            {
                Take('"');
                var word = new StringBuilder();
                while (true)
                {
                    if (at >= text.Length) throw Wrong("a quote");
                    var letter = text[at++];
                    if (letter == '"') return word.ToString();
                    if (letter != '\\') word.Append(letter);
                    else word.Append(Escaped());
                }
            }

            private char Escaped()
            {
                if (at >= text.Length) throw Wrong("an escape");
                var letter = text[at++];
                switch (letter)
                {
                    case 'n': return '\n';
                    case 't': return '\t';
                    case 'r': return '\r';
                    case 'b': return '\b';
                    case 'f': return '\f';
                    case 'u':
                        if (at + 4 > text.Length) throw Wrong("four hexadecimal digits");
                        at += 4;
                        return (char)int.Parse(text.Substring(at - 4, 4), NumberStyles.HexNumber, CultureInfo.InvariantCulture);
                    default: return letter;
                }
            }

            private double Number()
            {
                var start = at;
                while (at < text.Length && "+-.eE0123456789".IndexOf(text[at]) >= 0) at++;
                double number;
                var part = text.Substring(start, at - start);
                if (!double.TryParse(part, NumberStyles.Float, CultureInfo.InvariantCulture, out number)) throw Wrong("a value");
                return number;
            }

            private object Word(string word, object value)
            {
                if (string.CompareOrdinal(text, at, word, 0, word.Length) != 0) throw Wrong(word);
                at += word.Length;
                return value;
            }

            private void Take(char letter)
            {
                if (at >= text.Length || text[at] != letter) throw Wrong(letter.ToString());
                at++;
            }

            private void Space()
            {
                while (at < text.Length && char.IsWhiteSpace(text[at])) at++;
            }

            private FormatException Wrong(string expected)
            {
                return new FormatException("JSON, character " + at + ": expected " + expected);
            }
        }
    }
}
