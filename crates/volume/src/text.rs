//! Text of others for people: names and messages of peers, servers and files must not control a
//! terminal, hide, or show in another order than they have.
//!
//! Everything that prints such text uses these functions.

use std::borrow::Cow;

/// Whether a character must not be printed as it is. These are controls, format characters such as
/// bidirectional overrides, zero-width spaces and tags (Unicode category Cf), separators other than
/// the space, private use and unassigned characters, and letters and marks without a shape.
#[must_use]
pub fn is_unprintable(c: char) -> bool {
    match c {
        ' '..='~' => false,
        '\u{34f}'
        | '\u{115f}'..='\u{1160}'
        | '\u{17b4}'..='\u{17b5}'
        | '\u{180b}'..='\u{180f}'
        | '\u{2800}'
        | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}'
        | '\u{ffa0}'
        | '\u{e0100}'..='\u{e01ef}' => true,
        c => {
            // The standard library escapes by category. Behind another character it does not
            // escape combining marks, such as accents.
            let mut text = [b'x'; 5];
            let len = 1 + c.encode_utf8(&mut text[1..]).len();
            std::str::from_utf8(&text[..len]).is_ok_and(|text| text.escape_debug().nth(1) == Some('\\'))
        }
    }
}

/// Escapes what must not be printed, as `\n` or `\u{202e}`.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unprintable) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unprintable(c) {
            escaped.extend(c.escape_default());
        } else {
            escaped.push(c);
        }
    }
    escaped.into()
}

/// Replaces each character that must not be printed.
#[must_use]
pub fn replaced(text: &str, by: char) -> String {
    text.chars().map(|c| if is_unprintable(c) { by } else { c }).collect()
}

/// Escapes what must not be printed in the strings of a JSON text, whose value stays the same. Line
/// ends between its tokens stay.
#[must_use]
pub fn printable_json(json: &str) -> Cow<'_, str> {
    let is_escaped = |c| is_unprintable(c) && c != '\n';
    if !json.contains(is_escaped) {
        return json.into();
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if is_escaped(c) {
            let units =
                c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
            escaped.push_str(&units);
        } else {
            escaped.push(c);
        }
    }
    escaped.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_marks_and_symbols_of_any_language_are_printed() {
        let text = "Zm\u{11b}\u{159} cafe\u{301} \u{65e5}\u{672c} \u{915}\u{94d}\u{937}\u{93f} \u{5e9}\u{5dc} \u{1f600} \"'\\ \u{fffd}";
        assert_eq!(printable(text), text);
        assert_eq!(replaced(text, '?'), text);
    }

    #[test]
    fn what_controls_hides_or_reorders_text_is_escaped() {
        let escaped = [
            ("\u{1b}[2J\n\t", r"\u{1b}[2J\n\t"),
            // Bidirectional overrides, isolates and marks.
            ("\u{202e}\u{2066}\u{200f}\u{61c}", r"\u{202e}\u{2066}\u{200f}\u{61c}"),
            // Zero width, soft hyphen, and a byte order mark.
            ("a\u{200b}\u{200d}\u{2060}\u{ad}\u{feff}", r"a\u{200b}\u{200d}\u{2060}\u{ad}\u{feff}"),
            // Line and paragraph separators, and spaces that look like others.
            ("\u{2028}\u{2029}\u{a0}\u{3000}", r"\u{2028}\u{2029}\u{a0}\u{3000}"),
            // Tags, private use, and no character.
            ("\u{e0041}\u{e000}\u{f0000}\u{ffff}", r"\u{e0041}\u{e000}\u{f0000}\u{ffff}"),
            // C1 controls, of which U+009B begins a sequence for terminals.
            ("\u{9b}31m", r"\u{9b}31m"),
            // Letters and marks without a shape.
            ("\u{3164}\u{115f}\u{fe0f}\u{2800}", r"\u{3164}\u{115f}\u{fe0f}\u{2800}"),
        ];
        for (text, expected) in escaped {
            assert_eq!(printable(text), expected);
        }
        assert_eq!(replaced("a\u{202e}b\n", ' '), "a b ");
    }

    #[test]
    fn json_keeps_its_value() {
        assert_eq!(
            printable_json("{\n\"a\": \"x\u{202e}\u{e0041}\u{e9}\"}"),
            "{\n\"a\": \"x\\u202e\\udb40\\udc41\u{e9}\"}"
        );
    }
}
