//! Minimal lexing of Rust source: removes comments and literals, and finds tests.

use std::ops::Range;

/// `source` with comments and the content of literals blanked; lines are kept.
pub(super) fn code(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    loop {
        // Most text is plain: it is copied in one go.
        let plain = rest.bytes().position(may_begin_token).unwrap_or(rest.len());
        let (text, after) = rest.split_at(plain);
        code.push_str(text);
        let Some(first) = after.chars().next() else { break };
        let before = code.chars().next_back();
        let token = token(after, before.is_some_and(is_word));
        let (text, after) = after.split_at(token.unwrap_or(first.len_utf8()));
        match token {
            Some(_) => code.extend(text.chars().map(|c| if c == '\n' { c } else { ' ' })),
            None => code.push(first),
        }
        rest = after;
    }
    code
}

/// Line ranges, from 0, of a source's tests: the bodies of `mod`s under a `cfg` with `test`.
pub(super) fn test_lines(source: &str) -> Vec<Range<usize>> {
    let lines: Vec<&str> = source.lines().collect();
    let mut tests = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let opens = |line: &&&str| !line.starts_with('#');
        if is_test_cfg(line) && lines[start..].iter().find(opens).is_some_and(|line| inline_module(line)) {
            // In formatted source the closing brace is in the first column, too.
            let end =
                lines[start..].iter().position(|line| *line == "}").map_or(lines.len(), |at| start + at + 1);
            tests.push(start..end);
        }
    }
    tests
}

/// Whether a line is an attribute that excludes the next item from the product.
pub(super) fn is_test_cfg(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("#[cfg(") && (line.contains("test") || line.contains("feature = \"conformance\""))
}

/// Whether `c` can be part of a name.
pub(super) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn inline_module(line: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.contains(&"mod") && words.last() == Some(&"{")
}

/// Whether a comment or a literal may begin with `byte`.
fn may_begin_token(byte: u8) -> bool {
    matches!(byte, b'/' | b'"' | b'\'' | b'r' | b'b' | b'c')
}

/// Length of the comment or literal at the start of `text`, if there is one.
fn token(text: &str, after_word: bool) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    if text.starts_with("/*") {
        return Some(block_comment(text));
    }
    if let Some(content) = text.strip_prefix('"') {
        return Some(1 + quoted(content, '"'));
    }
    if text.starts_with('\'') {
        return character(text);
    }
    if after_word { None } else { raw_string(text) }
}

/// Length of a block comment. Block comments nest.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    loop {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            match rest.chars().next() {
                Some(c) => at += c.len_utf8(),
                None => return at,
            }
        }
    }
}

/// Length up to and including the closing quote.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        if !escaped && c == quote {
            return at + 1;
        }
        escaped = !escaped && c == '\\';
    }
    text.len()
}

/// Length of a character literal; `None` for a lifetime.
fn character(text: &str) -> Option<usize> {
    let mut chars = text.chars().skip(1);
    match (chars.next()?, chars.next()?) {
        ('\\', _) => Some(1 + quoted(&text[1..], '\'')),
        (c, '\'') => Some(2 + c.len_utf8()),
        _ => None,
    }
}

/// Length of a raw string literal, `r"..."` or `r#"..."#`, or of a raw byte string literal.
fn raw_string(text: &str) -> Option<usize> {
    let body = ["br", "cr", "r"].iter().find_map(|prefix| text.strip_prefix(prefix))?;
    let content = body.trim_start_matches('#');
    let hashes = body.len() - content.len();
    let content = content.strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = content.find(&close).map_or(content.len(), |at| at + close.len());
    Some(text.len() - content.len() + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blank_and_lines_stay() {
        let cases = [
            ("a // b\nc", "a     \nc"),
            ("a /* b /* c */ \n d */ e", "a              \n      e"),
            (r#"f("b\"c", 'd')"#, "f(      ,    )"),
            (r##"f(r#"b"c"#)d"##, "f(        )d"),
            (r#"f(b"x", br"\")y"#, "f(b   ,      )y"),
            ("f::<'a>('\\'', 'é')", "f::<'a>(    ,    )"),
            ("for\"x\"", "for   "),
        ];
        for (source, expected) in cases {
            assert_eq!(code(source).trim_end(), expected.trim_end(), "{source}");
        }
    }

    #[test]
    fn a_test_module_ends_at_its_brace_and_a_test_import_is_none() {
        let source = "\
#[cfg(test)]
use a::b;
fn f() {
}
#[cfg(test)]
#[allow(x)]
mod tests {
    fn g() {
    }
}
fn h() {}
";
        let tests = test_lines(source);
        assert_eq!((tests.len(), &tests[0]), (1, &(4..10)));
    }

    #[test]
    fn a_conformance_suite_is_tests() {
        assert!(is_test_cfg("#[cfg(any(test, feature = \"conformance\"))]"));
        assert!(!is_test_cfg("#[cfg(target_os = \"linux\")]"));
    }
}
