//! URLs of remote volumes, whose passwords are never printed.

use super::secrets::url_without_secrets;
use crate::block_sizes::BlockSizes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A URL, kept unchanged. It prints without its secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct Url(String);

impl Url {
    /// Keeps `text`, without parsing it.
    #[must_use]
    pub fn new(text: &str) -> Url {
        Url(text.to_owned())
    }

    /// The whole URL with its password, for connecting. Never print it.
    #[must_use]
    pub fn as_written(&self) -> &str {
        &self.0
    }

    /// The parameters that set block sizes, as key and value. They are not sent to the server.
    pub(super) fn block_parameters(&self) -> impl Iterator<Item = (&str, &str)> {
        let query = self.0.split_once('?').map_or("", |(_, query)| query);
        query.split('&').filter_map(|text| text.split_once('=')).filter(|(key, _)| is_block_size(key))
    }

    /// The URL without the parameters that set block sizes, which no protocol defines.
    #[must_use]
    pub fn without_block_sizes(&self) -> Url {
        let Some((place, query)) =
            self.0.split_once('?').filter(|_| self.block_parameters().next().is_some())
        else {
            return self.clone();
        };
        let is_other = |text: &&str| text.split_once('=').is_none_or(|(key, _)| !is_block_size(key));
        let others: Vec<&str> = query.split('&').filter(is_other).collect();
        Url(if others.is_empty() { place.to_owned() } else { format!("{place}?{}", others.join("&")) })
    }

    /// Resolves relative paths in parameters against `directory`: `socket`, and those that end in
    /// `_file`.
    #[must_use]
    pub fn below(&self, directory: &Path) -> Url {
        let Some((place, query)) = self.0.split_once('?') else { return self.clone() };
        let parameter = |text: &str| match text.split_once('=') {
            Some((key, path)) if is_path(key) && !path.is_empty() && !is_absolute(path) => {
                format!("{key}={}{path}", encoded(directory))
            }
            _ => text.to_owned(),
        };
        let query: Vec<String> = query.split('&').map(parameter).collect();
        Url(format!("{place}?{}", query.join("&")))
    }
}

fn is_path(key: &str) -> bool {
    ["socket", "tls-certificates", "tls-psk-file"].contains(&key) || key.ends_with("_file")
}

fn is_block_size(key: &str) -> bool {
    [BlockSizes::LOGICAL, BlockSizes::PHYSICAL].contains(&key)
}

fn is_absolute(path: &str) -> bool {
    path.starts_with('/') || path.get(..3).is_some_and(|begin| begin.eq_ignore_ascii_case("%2f"))
}

/// Characters that are encoded in a path: all but letters, digits and these.
const PATH_ENCODE_SET: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A directory with a trailing slash, encoded for a URL; empty for the current directory.
fn encoded(directory: &Path) -> String {
    let mut text = percent_encode(directory.as_os_str().as_bytes(), PATH_ENCODE_SET).to_string();
    if !text.is_empty() && !text.ends_with('/') {
        text.push('/');
    }
    text
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&url_without_secrets(&self.0))
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
    fn relative_paths_are_resolved_against_a_directory() {
        let below = |url: &str| Url::new(url).below(Path::new("/etc/a b")).as_written().to_owned();
        assert_eq!(
            below("nbd+unix:///x?socket=s&timeout=1s"),
            "nbd+unix:///x?socket=/etc/a%20b/s&timeout=1s"
        );
        assert_eq!(
            below("iscsi://u@h/iqn.a?secret_file=a&mutual_secret_file=/b"),
            "iscsi://u@h/iqn.a?secret_file=/etc/a%20b/a&mutual_secret_file=/b"
        );
        for same in ["nbd+unix:///x?socket=%2Fs", "nbd://h/x", "nbd://h/x?connections=2"] {
            assert_eq!(below(same), same);
        }
        assert_eq!(Url::new("a://?socket=s").below(Path::new("")).as_written(), "a://?socket=s");
    }

    #[test]
    fn block_sizes_are_not_sent_to_the_server() {
        let without = |url: &str| Url::new(url).without_block_sizes().as_written().to_owned();
        assert_eq!(without("nbd://h/x?block_size=4k"), "nbd://h/x");
        assert_eq!(
            without("iscsi://u%p@h/iqn.a?timeout=1s&block_size=512&physical_block_size=4k&chap_a=MD5"),
            "iscsi://u%p@h/iqn.a?timeout=1s&chap_a=MD5"
        );
        for same in ["nbd://h/x", "nbd://h/block_size=4k", "nbd+unix:///x?socket=/a", "no url"] {
            assert_eq!(without(same), same);
        }
    }

    #[test]
    fn a_password_is_kept_and_never_shown() {
        for (written, shown) in [
            ("iscsi://user%secret@host/iqn.a/0?b=c@d", "iscsi://user@host/iqn.a/0?b=c@d"),
            ("ISCSI://user%se/cr@et@host/iqn.a/0", "ISCSI://user@host/iqn.a/0"),
            ("iser://user%se/cret@host/iqn.a/0?rdma=iwarp", "iser://user@host/iqn.a/0?rdma=iwarp"),
            ("iscsi://user@host/iqn.a/0", "iscsi://user@host/iqn.a/0"),
            ("iscsi://u%secret@[::1]:1/iqn.a:b@c/0", "iscsi://u@[::1]:1/iqn.a:b@c/0"),
            ("iscsi://h,[fe80::1%25a]:1/iqn.a:b@c/0", "iscsi://h,[fe80::1%25a]:1/iqn.a:b@c/0"),
            ("iscsi://user:sec/secret@host/iqn.a/0", "iscsi://user@host/iqn.a/0"),
            ("iscsi://a@b%secret@host/iqn.a/0", "iscsi://a@b@host/iqn.a/0"),
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
