//! Finds the secrets in a spec or URL as somebody wrote it, also if it cannot be parsed.
//!
//! A secret is what stands between a user's name and the `@` before a host, after `%` (iSCSI) or
//! `:`, and the value of a parameter whose key means a secret. In a text that cannot be parsed,
//! more is hidden rather than less.

use super::user::split_user;
use std::ops::Range;

/// The text without its secrets, as valid URLs are printed.
#[must_use]
pub fn without_secrets(text: &str) -> String {
    removed(text, &begins_of_urls(text))
}

/// [`without_secrets`] of a text that is one URL, whose user may contain `://`.
pub(super) fn url_without_secrets(url: &str) -> String {
    let begin = url.find("://").map(|at| at + 3);
    removed(url, begin.as_slice())
}

fn removed(text: &str, begins: &[usize]) -> String {
    let all = secrets(text, begins, true);
    replaced(text, all, |secret| if secret.starts_with(['%', ':']) { "" } else { HIDDEN })
}

/// The text with its secrets replaced by `...`, so that it has the same parts: a parser finds the
/// same errors in it, apart from those of the secrets.
#[must_use]
pub fn with_hidden_secrets(text: &str) -> String {
    replaced(text, secrets(text, &begins_of_urls(text), false), |secret| match secret.as_bytes().first() {
        Some(b'%') => "%...",
        Some(b':') => ":...",
        _ => HIDDEN,
    })
}

fn replaced(text: &str, secrets: Vec<Range<usize>>, by: impl Fn(&str) -> &'static str) -> String {
    let (mut out, mut done) = (String::with_capacity(text.len()), 0);
    for Range { start, end } in secrets {
        if start >= done {
            out += &text[done..start];
            out += by(&text[start..end]);
            done = end;
        }
    }
    out + &text[done..]
}

/// Where the URLs of a text begin, behind their `://`. One within the user of a URL begins no other
/// URL: the user ends before a comma, space, quote or `=`.
fn begins_of_urls(text: &str) -> Vec<usize> {
    let mut begins = Vec::new();
    if text.starts_with("//") {
        begins.push(2);
    }
    for (at, mark) in text.match_indices("://") {
        let is_own = begins.last().is_none_or(|&last| {
            let before = text.get(last..at).filter(|before| before.len() <= MAX_USER);
            let Some(before) = before else { return true };
            let is_separator = |&(at, mark): &(usize, char)| match mark {
                '=' => !means_secret(before[..at].rsplit(['?', '&']).next().unwrap_or_default()),
                mark => [',', ' ', '\n', '\t', '\'', '"', '`'].contains(&mark),
            };
            let separator = before.char_indices().rev().find(is_separator).map(|(at, _)| at);
            separator
                .is_some_and(|end| before[..end].contains('@') || is_plain_authority(host(&before[..end])))
        });
        if is_own {
            begins.push(at + mark.len());
        }
    }
    begins
}

/// The scheme before the `://` that ends at `begin`.
fn scheme_before(text: &str, begin: usize) -> &str {
    let before = &text[..begin.saturating_sub(3)];
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "+-.".contains(letter);
    &before[before.trim_end_matches(is_part).len()..]
}

/// The part of a URL, without its scheme, in which its user and host are.
fn host(url: &str) -> &str {
    url.split(['/', '?', '#']).next().unwrap_or(url)
}

/// The ranges of all secrets in order; the secret of a user begins with its `%` or `:`. If the text
/// is valid, a `%` in a host is part of the host.
fn secrets(text: &str, begins: &[usize], is_valid: bool) -> Vec<Range<usize>> {
    let scheme_of = |begin: usize| scheme_before(text, begin);
    let mut found = Vec::new();
    for (nth, &begin) in begins.iter().enumerate() {
        let next = begins.get(nth + 1).map(|next| next - 3 - scheme_of(*next).len());
        let url = &text[begin..next.unwrap_or(text.len())];
        let all = secret_of_user(scheme_of(begin), url, is_valid).into_iter().chain(secret_parameters(url));
        found.extend(all.map(|Range { start, end }| begin + start..begin + end));
    }
    if begins.is_empty() && !is_valid {
        // Perhaps a URL with a mistake in its scheme.
        let ends = text.find('%').zip(text.rfind('@')).filter(|(begin, end)| begin < end);
        found.extend(ends.map(|(begin, end)| begin..end));
    }
    found
}

/// The secret of the user before the host. `url` begins behind `://`.
fn secret_of_user(scheme: &str, url: &str, is_valid: bool) -> Option<Range<usize>> {
    let place = url.split('?').next().unwrap_or(url);
    let authority = host(url);
    // Before the query of an iSCSI URL, an @ ends the user, whose password may contain @ and
    // slashes. In other URLs a path may contain an @.
    let is_iscsi = ["iscsi", "iser"].iter().any(|name| scheme.eq_ignore_ascii_case(name));
    let end = match (is_iscsi, is_valid) {
        (true, true) => split_user(place).0.map(str::len),
        (true, false) => place.rfind('@').or_else(|| url.rfind('@').filter(|end| url[..*end].contains('%'))),
        (false, _) => authority.rfind('@'),
    };
    // In a valid URL, the user of iSCSI whose secret is in a file may contain a colon, and those of
    // others may have encoded letters.
    let is_letter = |at: usize| {
        let digits = url.as_bytes().get(at + 1..at + 3);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let begins_secret = |at: usize, mark: char| match mark {
        '%' => is_iscsi || !is_valid || !is_letter(at),
        ':' => !(is_iscsi && is_valid && url.contains("secret_file=")),
        _ => false,
    };
    let is_plain = is_valid || is_plain_authority(authority);
    let end = end.or_else(|| url.rfind('@').filter(|_| !is_plain));
    match end {
        Some(end) => {
            let mut marks = url[..end].char_indices();
            let begin = marks.find(|&(at, mark)| begins_secret(at, mark));
            Some(begin.map_or(end, |(at, _)| at)..end).filter(|own| !own.is_empty())
        }
        // The host is missing.
        None if is_plain => None,
        None => authority.find('%').map(|begin| begin..place.len()),
    }
}

/// Whether the text consists of hosts with optional ports, as `a,[::1%eth0]:10809`. A `%` elsewhere
/// than in brackets is more likely to be before a password.
///
/// A message goes on behind the URL, after a colon.
fn is_plain_authority(authority: &str) -> bool {
    let authority = authority.split_whitespace().next().unwrap_or_default().trim_end_matches(':');
    authority.split(',').all(|part| {
        let port = match part.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((_, rest)) => rest.strip_prefix(':').unwrap_or(rest),
            None => match part.split_once(':') {
                Some((host, port)) if !host.contains('%') => port,
                Some(_) => return false,
                None => return !part.contains('%'),
            },
        };
        port.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// The values of parameters that mean secrets.
fn secret_parameters(url: &str) -> Vec<Range<usize>> {
    let Some(query) = url.find('?') else { return Vec::new() };
    let (mut found, mut at) = (Vec::new(), query + 1);
    for parameter in url[at..].split('&') {
        let key = parameter.split('=').next().unwrap_or_default();
        if means_secret(key) && key.len() + 1 < parameter.len() {
            found.push(at + key.len() + 1..at + parameter.len());
        }
        at += parameter.len() + 1;
    }
    found
}

/// Whether a parameter with this key is a secret.
fn means_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    SECRETS.iter().any(|word| key.contains(word)) && !key.ends_with("file")
}

/// Parts of the keys of parameters that mean secrets, unless the key ends in `file`.
const SECRETS: [&str; 6] = ["secret", "pass", "pwd", "token", "psk", "key"];
const HIDDEN: &str = "...";
/// More bytes than a user and a password have.
const MAX_USER: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_in_every_form_of_url_and_everything_else_is_shown() {
        for (written, without, hidden) in [
            ("iscsi://u%SECRET@h/iqn.a/0", "iscsi://u@h/iqn.a/0", "iscsi://u%...@h/iqn.a/0"),
            (
                "iser://u%SE/CR@ET@h/iqn.a/0?rdma=iwarp",
                "iser://u@h/iqn.a/0?rdma=iwarp",
                "iser://u%...@h/iqn.a/0?rdma=iwarp",
            ),
            ("iscsi://u%SE?CRET@h/iqn.a", "iscsi://u%SE?CRET@h/iqn.a", "iscsi://u%...@h/iqn.a"),
            ("iscsi://u%25SE%43RET%40h/iqn.a", "iscsi://u%25SE%43RET%40h/iqn.a", "iscsi://u%..."),
            ("iscsi://u%SECRET", "iscsi://u%SECRET", "iscsi://u%..."),
            ("nbd://u:SECRET@h/a", "nbd://u@h/a", "nbd://u:...@h/a"),
            ("nbds://u:SE/CRET@h/a", "nbds://u:SE/CRET@h/a", "nbds://u:...@h/a"),
            (
                "nbd+unix://u%SECRET@/a?socket=/s",
                "nbd+unix://u@/a?socket=/s",
                "nbd+unix://u%...@/a?socket=/s",
            ),
            ("nbds://al%40ice@h/a", "nbds://al%40ice@h/a", "nbds://al%...@h/a"),
            (
                "iscsi://dom:al@h/iqn.a/0?secret_file=s",
                "iscsi://dom:al@h/iqn.a/0?secret_file=s",
                "iscsi://dom:...@h/iqn.a/0?secret_file=s",
            ),
            (
                "iscsi://al?ice%SECRET@h:1/iqn.a/1",
                "iscsi://al?ice%SECRET@h:1/iqn.a/1",
                "iscsi://al?ice%...@h:1/iqn.a/1",
            ),
            ("nvme+tcp://u:SECRET@h/nqn.a/1", "nvme+tcp://u@h/nqn.a/1", "nvme+tcp://u:...@h/nqn.a/1"),
            (
                "nvme+rdma://h/nqn.a?dhchap_secret=SECRET&b=c",
                "nvme+rdma://h/nqn.a?dhchap_secret=...&b=c",
                "nvme+rdma://h/nqn.a?dhchap_secret=...&b=c",
            ),
            ("srp://u:SECRET@h/01/0", "srp://u@h/01/0", "srp://u:...@h/01/0"),
            ("aoe://u:SECRET@eth0/e1.1", "aoe://u@eth0/e1.1", "aoe://u:...@eth0/e1.1"),
            (
                "stripe:[iscsi://u%SECRET@h/iqn.a,nbd://v:SECRET@h",
                "stripe:[iscsi://u@h/iqn.a,nbd://v@h",
                "stripe:[iscsi://u%...@h/iqn.a,nbd://v:...@h",
            ),
            (
                "a=delay:1ms:iscsi://u%SECRET@h/iqn.a",
                "a=delay:1ms:iscsi://u@h/iqn.a",
                "a=delay:1ms:iscsi://u%...@h/iqn.a",
            ),
            ("iscsi://u%SE://CRET@h/iqn.a/0", "iscsi://u@h/iqn.a/0", "iscsi://u%...@h/iqn.a/0"),
            ("nbd://h?psk=S:00://E=&a=b", "nbd://h?psk=...&a=b", "nbd://h?psk=...&a=b"),
            ("nbd://h?x=http://u:SECRET@g", "nbd://h?x=http://u@g", "nbd://h?x=http://u:...@g"),
            ("nbd://u:SE://CRET@h/a", "nbd://u:SE://CRET@h/a", "nbd://u:...@h/a"),
            (
                "iscsi://u%SE,CR=E://T@h/iqn.a,nbd://h/b",
                "iscsi://u@h/iqn.a,nbd://h/b",
                "iscsi://u%...@h/iqn.a,nbd://h/b",
            ),
            ("//u:SECRET@h", "//u@h", "//u:...@h"),
            ("iscsi:/u%SECRET@h", "iscsi:/u%SECRET@h", "iscsi:/u%...@h"),
        ] {
            assert_eq!(
                (without_secrets(written), with_hidden_secrets(written)),
                (without.to_owned(), hidden.to_owned())
            );
        }
        for same in [
            "nbd://host:10809/a@b",
            "nbd+unix:///a?socket=/run/a@b",
            "iscsi://user@host/iqn.a/0?b=c@d&secret_file=/etc/s",
            "nvme+tcp://[fe80::1%eth0]:4420,host:4421/nqn.a?tls_key_file=k",
            "iscsi://[fe80::1%25p0]:3261: [fe80::1%2]:3261: connection failed",
            "http://[fe80::1%p0]:9810: connection failed",
            "nbds://h/x?tls-psk-file=/k&tls-username=u",
            "file:/srv/a@b?size=1g",
            "mem:1g",
            "",
        ] {
            assert_eq!(
                (without_secrets(same), with_hidden_secrets(same)),
                (same.to_owned(), same.to_owned())
            );
        }
    }
}
