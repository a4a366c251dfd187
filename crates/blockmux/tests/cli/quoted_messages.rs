//! Messages that the pages for users quote are those of the program.

use crate::examples::{Page, pages};
use std::fs;
use std::path::Path;

/// Programs whose command lines, of words alone, look like messages.
const PROGRAMS: [&str; 11] =
    ["apt", "blockmux", "cargo", "ctl", "dnf", "modprobe", "nbdkit", "podman", "rdma", "setcap", "systemctl"];

/// Quotes of other programs, and whose they are.
const OF_OTHERS: [(&str, &str); 1] = [("Already connected to target port", "Linux")];

/// What a page quotes as the program's message, with its line.
fn quotes(page: &Page) -> Vec<(usize, String)> {
    let is_word =
        |word: &str| word.bytes().all(|byte| byte.is_ascii_lowercase() || b"._,;:'".contains(&byte));
    let is_message = |text: &str| {
        let words: Vec<_> = text.split(' ').collect();
        let is_plain = words.iter().filter(|word| is_word(word)).count() >= 3;
        is_plain && !text.contains(['=', '/']) && !PROGRAMS.contains(&words[0])
    };
    let mut quotes: Vec<_> = page.spans().into_iter().filter(|(_, text)| is_message(text)).collect();
    for block in page.blocks() {
        for (at, line) in block.lines.iter().enumerate() {
            let logged = ["INFO ", "WARN ", "ERROR "].iter().find_map(|level| line.strip_prefix(level));
            let message = match (line.strip_prefix("blockmux: "), logged) {
                (None, None) => continue,
                (Some(error), _) => error.to_owned(),
                (None, Some(logged)) => {
                    let (message, fields) = logged.split_once(" protocol=").unwrap_or((logged, ""));
                    let (_, reason) = fields.split_once(" reason=").unwrap_or_default();
                    format!("{message}; {}", reason.trim_matches('"'))
                }
            };
            quotes.push((block.line + at, message));
        }
    }
    quotes.retain(|(_, quote)| OF_OTHERS.iter().all(|(text, _)| text != quote));
    quotes
}

/// The literals of a source file without its tests, with `*` for each value.
fn literals(source: &str) -> Vec<String> {
    let source = source.split("\n#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = code.collect::<Vec<_>>().join("\n").replace("'\"'", "").replace("b'\"'", "");
    let mut literals = Vec::new();
    let mut chars = code.chars();
    while chars.by_ref().any(|next| next == '"') {
        let (mut literal, mut depth) = (String::new(), 0_u32);
        while let Some(next) = chars.next() {
            match next {
                '"' => break,
                '\\' => match chars.next() {
                    Some('\n') => {
                        let rest = chars.as_str().trim_start();
                        chars = rest.chars();
                    }
                    Some(escaped) => literal.push(escaped),
                    None => {}
                },
                '{' => depth += 1,
                '}' => {
                    depth = depth.saturating_sub(1);
                    literal.push('*');
                }
                _ if depth == 0 => literal.push(next),
                _ => {}
            }
        }
        literals.push(literal);
    }
    literals
}

/// The words of a text without punctuation at their ends.
fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().map(|word| word.trim_matches([':', ';', ',', '.'])).collect()
}

/// Whether a format string can print these words, at least half of which are its own.
fn prints(pattern: &[&str], quote: &[&str], own: usize) -> bool {
    let Some((word, rest)) = quote.split_first() else { return own > 0 };
    let Some((part, more)) = pattern.split_first() else { return false };
    match part.contains('*') {
        true => prints(more, rest, own) || prints(pattern, rest, own),
        false => part == word && prints(more, rest, own + 1),
    }
}

fn is_printed(patterns: &[Vec<&str>], quote: &str) -> bool {
    let quote = words(quote);
    let own = |pattern: &[&str]| quote.iter().filter(|word| pattern.contains(word)).count();
    patterns.iter().any(|pattern| {
        own(pattern) * 2 >= quote.len() && (0..pattern.len()).any(|at| prints(&pattern[at..], &quote, 0))
    })
}

/// The literals of all sources of the program.
fn all_literals() -> Vec<String> {
    let mut directories = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("..")];
    let mut found = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() && !["tests", "examples", "benches", "target"].contains(&name) {
                directories.push(path);
            } else if name.ends_with(".rs") && name != "tests.rs" {
                found.extend(literals(&fs::read_to_string(path).unwrap()));
            }
        }
    }
    found
}

#[test]
fn every_message_that_the_documents_quote_is_in_the_sources() {
    let literals = all_literals();
    let patterns: Vec<_> = literals.iter().map(|literal| words(literal)).collect();
    let pages = pages();
    let quotes = pages.iter().flat_map(|page| quotes(page).into_iter().map(move |quote| (page, quote)));
    let mut gone = Vec::new();
    let mut count = 0;
    for (page, (line, quote)) in quotes {
        let parts = quote.split("...").flat_map(|part| part.split("; ")).flat_map(|part| part.split(": "));
        // Single words are names, or what another message says.
        let parts: Vec<_> = parts.filter(|part| words(part).len() > 1).collect();
        assert!(!parts.is_empty(), "{}:{line}: `{quote}` has too few words", page.name);
        if !parts.iter().all(|part| is_printed(&patterns, part)) {
            gone.push(format!("{}:{line}: {quote}", page.name));
        }
        count += 1;
    }
    assert!(gone.is_empty(), "{}", gone.join("\n"));
    assert!(count > 8, "{count}");
}

#[test]
fn a_quote_is_compared_with_format_strings() {
    let literals =
        literals("say(\"cannot listen on {address}: {} \\\n    now; \\\"{name}\\\"\"); // \"gone\"\n");
    let patterns: Vec<_> = literals.iter().map(|literal| words(literal)).collect();
    assert!(is_printed(&patterns, "cannot listen on"));
    assert!(is_printed(&patterns, "cannot listen on 192.0.2.1:3260: in use now"));
    assert!(!is_printed(&patterns, "cannot listen at 192.0.2.1:3260"));
    assert!(!is_printed(&patterns, "Address already in use"));
}
