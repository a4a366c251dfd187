//! URLs as they were written, and as they may be shown.

use std::fmt;

/// A URL, kept whole. It prints without a password that may stand before its host.
#[derive(Clone, PartialEq, Eq)]
pub struct Url(String);

impl Url {
    /// Keeps `text`, whatever it is.
    #[must_use]
    pub fn new(text: &str) -> Url {
        Url(text.to_owned())
    }

    /// All of it, for whoever connects; to be shown to nobody.
    #[must_use]
    pub fn as_written(&self) -> &str {
        &self.0
    }

    /// What stands before and behind a password.
    fn shown(&self) -> (&str, &str) {
        let Some((scheme, rest)) = self.0.split_once("://") else { return (&self.0, "") };
        // In iSCSI only a password can hold an @ or a slash there; elsewhere a path can hold an @.
        let is_iscsi = ["iscsi", "iser"].iter().any(|name| scheme.eq_ignore_ascii_case(name));
        let ends: &[char] = if is_iscsi { &['?'] } else { &['/', '?', '#'] };
        let authority = rest.split(ends).next().unwrap_or(rest);
        let Some((user, _)) = authority.rsplit_once('@') else { return (&self.0, "") };
        let name = user.split(['%', ':']).next().unwrap_or(user);
        let begin = scheme.len() + "://".len();
        (&self.0[..begin + name.len()], &self.0[begin + user.len()..])
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, behind) = self.shown();
        f.write_str(before)?;
        f.write_str(behind)
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_kept_and_never_shown() {
        for (written, shown) in [
            ("iscsi://user%secret@host/iqn.a/0?b=c@d", "iscsi://user@host/iqn.a/0?b=c@d"),
            ("ISCSI://user%se/cr@et@host/iqn.a/0", "ISCSI://user@host/iqn.a/0"),
            ("iser://user%se/cret@host/iqn.a/0?rdma=iwarp", "iser://user@host/iqn.a/0?rdma=iwarp"),
            ("iscsi://user@host/iqn.a/0", "iscsi://user@host/iqn.a/0"),
            ("nbd://user:secret@host/a", "nbd://user@host/a"),
            ("nbd://host:10809/a@b", "nbd://host:10809/a@b"),
            ("nbd+unix:///a?socket=/run/a@b", "nbd+unix:///a?socket=/run/a@b"),
            ("no url", "no url"),
        ] {
            let url = Url::new(written);
            assert_eq!((url.as_written(), url.to_string().as_str()), (written, shown));
            assert!(!format!("{url:?}").contains("secret"));
        }
    }
}
