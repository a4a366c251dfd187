//! Standard output, and texts that come from elsewhere made fit for a terminal.

use crate::failure::Failure;
use blockmux_volume::units::human_size;
use std::borrow::Cow;
use std::io::{ErrorKind, Write};

/// Writes `text` and a newline, at once. A reader that has gone is no failure: it has what it wanted.
pub(crate) fn print(text: impl std::fmt::Display) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::run(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Whether escape sequences for colours are welcome on a terminal.
pub(crate) fn may_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// `text` with control characters escaped: a server's words must not move the cursor.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let escape = |letter: char| match letter {
        letter if letter.is_control() => letter.escape_default().to_string(),
        letter => letter.to_string(),
    };
    text.chars().map(escape).collect::<String>().into()
}

/// A size in bytes, exactly and in short.
pub(crate) fn both_sizes(size: u64) -> String {
    format!("{size} ({})", human_size(size))
}

/// `word` as a shell reads it back.
pub(crate) fn shell_word(word: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', r"'\''")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("plain \u{e9}"), "plain \u{e9}");
        assert_eq!(printable("\u{1b}[2Jx\n"), "\\u{1b}[2Jx\\n");
    }

    #[test]
    fn a_shell_reads_a_word_back() {
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
