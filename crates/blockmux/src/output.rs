//! Standard output, and sanitizing foreign text for a terminal.

use blockmux_volume::spec::with_hidden_secrets;
pub(crate) use blockmux_volume::text::{printable, printable_json};
use blockmux_volume::units::human_size;
use std::borrow::Cow;

/// Whether colours may be used on a terminal.
pub(crate) fn may_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Hides what may be the secret of a URL in a message, which may quote a text of the user.
pub(crate) fn masked(text: &str) -> String {
    const ENDS: [char; 4] = [' ', '`', '"', '\''];
    let words = text.split_inclusive(ENDS);
    let hidden = words.map(|word| match word.contains("%password@") {
        // It says how to write one.
        true => word.to_owned(),
        false => {
            let (word, end) = word.split_at(word.trim_end_matches(ENDS).len());
            with_hidden_secrets(word) + end
        }
    });
    hidden.collect()
}

/// Shortens a long text to its beginning and end, because text of a server must not fill the
/// screen, and the advice is at the end.
pub(crate) fn shortened(text: &str) -> Cow<'_, str> {
    let count = text.chars().count();
    if count <= MAX_LINE {
        return text.into();
    }
    let (begin, end) = (MAX_LINE * 2 / 3, MAX_LINE / 3);
    let head = text.chars().take(begin);
    let tail = text.chars().skip(count - end);
    head.chain(" [...] ".chars()).chain(tail).collect::<String>().into()
}

/// Formats a size in bytes, exactly and rounded.
pub(crate) fn both_sizes(size: u64) -> String {
    format!("{size} ({})", human_size(size))
}

/// Quotes `word` for a shell.
pub(crate) fn shell_word(word: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', r"'\''")).into()
}

/// The maximum length of a message, in characters.
const MAX_LINE: usize = 1500;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_in_the_middle() {
        assert_eq!(shortened("short"), "short");
        let long = format!("volume: {}; check --nbd", "x".repeat(3000));
        let said = shortened(&long);
        assert!(said.len() < 1600 && said.starts_with("volume: x") && said.ends_with("x; check --nbd"));
        assert!(said.contains("x [...] x"));
    }

    #[test]
    fn a_message_quotes_no_password_of_an_invalid_url() {
        for (said, shown) in [
            ("nbd://a@h/x: host \"a%se/cr@et@h:1\": no user", "nbd://a@h/x: host \"a%...@h:1\": no user"),
            ("`iscsi` in `iscsi:/a%secret@h` is none", "`iscsi` in `iscsi:/a%...@h` is none"),
            ("no volume `iscsi://a%secret`; choose", "no volume `iscsi://a%...`; choose"),
            ("write user%password@host", "write user%password@host"),
            ("write %25 for a %, x@y", "write %25 for a %, x@y"),
        ] {
            assert_eq!(masked(said), shown);
        }
    }

    #[test]
    fn a_shell_reads_a_quoted_word_unchanged() {
        for (word, quoted) in [
            ("nbd://127.0.0.1:10/a", "nbd://127.0.0.1:10/a"),
            ("nbd+unix:///a?socket=/s", "'nbd+unix:///a?socket=/s'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
        ] {
            assert_eq!(shell_word(word), quoted);
        }
    }
}
