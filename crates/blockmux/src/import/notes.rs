//! Comments of an object in the written config.

use crate::output::printable;

/// What stands in comments beside an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Notes(Vec<Note>);

/// One comment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// A setting without a counterpart, which is counted.
    Lost(String),
    /// What the reader of the config should know.
    Remark(String),
}

impl Notes {
    /// A setting without a counterpart. Its value is hidden if it may be a secret.
    pub(super) fn setting(&mut self, key: &str, value: &str) {
        let value = if is_secret(key) { "(hidden)" } else { value };
        self.lost(format!("{key} {value}"));
    }

    /// Something without a counterpart; `text` contains no secret.
    pub(super) fn lost(&mut self, text: impl Into<String>) {
        self.0.push(Note::Lost(text.into()));
    }

    /// What the reader of the config should know.
    pub(super) fn remark(&mut self, text: impl Into<String>) {
        self.0.push(Note::Remark(text.into()));
    }

    /// Moves all notes of `other` behind these.
    pub(super) fn append(&mut self, other: &mut Notes) {
        self.0.append(&mut other.0);
    }

    /// Moves the settings without a counterpart of `other` behind these; its remarks are about an
    /// object that is left out.
    pub(super) fn append_lost(&mut self, other: &mut Notes) {
        self.0.extend(other.0.drain(..).filter(|note| matches!(note, Note::Lost(_))));
    }

    /// The number of settings without a counterpart.
    pub(super) fn count(&self) -> usize {
        self.0.iter().filter(|note| matches!(note, Note::Lost(_))).count()
    }

    /// The comments, each one line.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|note| match note {
            Note::Lost(text) => comment(&format!("no counterpart: {text}")),
            Note::Remark(text) => comment(text),
        })
    }
}

/// A text as one comment line: a line break in it would continue as a key.
pub(super) fn comment(text: &str) -> String {
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let plain = plain.trim();
    let mut line: String = plain.chars().take(MAX_COMMENT).collect();
    if line.len() < plain.len() {
        line.push_str(" ...");
    }
    format!("# {}", printable(&line)).trim_end().to_owned()
}

/// Whether a key may hold a secret.
fn is_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    ["pass", "secret", "psk", "key", "incominguser", "outgoinguser", "chap", "token", "auth_pw"]
        .iter()
        .any(|word| key.contains(word))
}

/// Maximum length of a comment, in characters.
const MAX_COMMENT: usize = 240;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_is_one_line_and_shows_no_secret() {
        let mut notes = Notes::default();
        notes.setting("mode_page", "8:0\n[[volume]]\u{1b}[1m");
        notes.setting("chap_password", "of twelve bytes");
        notes.setting("IncomingUser", "joe of twelve bytes");
        notes.remark("long ".repeat(200));
        let lines: Vec<_> = notes.lines().collect();
        assert_eq!(lines[0], "# no counterpart: mode_page 8:0 [[volume]] [1m");
        assert_eq!(lines[1], "# no counterpart: chap_password (hidden)");
        assert!(!lines[2].contains("twelve"));
        assert!(lines[3].len() < 260 && lines[3].ends_with(" ..."));
        assert!(lines.iter().all(|line| !line.contains('\n')));
        assert_eq!(notes.count(), 3);
    }
}
