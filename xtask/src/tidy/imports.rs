//! Which modules of its crate a source uses.

use super::Tree;
use super::source::{code, is_word, test_lines};

/// Where a module uses another one.
#[derive(Clone)]
pub(super) struct ImportSite {
    pub(super) path: String,
    /// Line number, from 1.
    pub(super) line: usize,
}

/// The module path of `file` from the crate's root.
pub(super) fn module_path(file: &str) -> Vec<String> {
    let mut names: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if names.last().is_some_and(|last| last == "mod") || names == ["lib"] || names == ["main"] {
        names.pop();
    }
    names
}

/// Every path in product code that begins with `crate`, `self` or `super`, with its line from 1.
/// Groups are expanded.
pub(super) fn used(source: &str) -> Vec<(usize, Vec<String>)> {
    let tests = test_lines(source);
    let code = code(source);
    let mut paths = Vec::new();
    let mut at = 0;
    while let Some(found) = code[at..].find(is_word) {
        let start = at + found;
        let word = word(&code[start..]);
        at = start + word.len();
        let continues = code[..start].ends_with("::");
        if matches!(word, "crate" | "self" | "super") && code[at..].starts_with("::") && !continues {
            let line = code[..start].matches('\n').count();
            let mut group = Vec::new();
            at += tails(&code[at..], &[word.to_owned()], &mut group);
            if !tests.iter().any(|test| test.contains(&line)) {
                paths.extend(group.into_iter().map(|path| (line + 1, path)));
            }
        }
    }
    paths
}

/// The paths that a source re-exports (`pub use`), without a leading `self`. Groups are expanded.
pub(super) fn exported(source: &str) -> Vec<Vec<String>> {
    let code = code(source);
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("use ") {
        let before = code[..at].trim_end();
        let visibility = before.rsplit(['\n', ';', '}']).next().unwrap_or_default().trim_start();
        if !visibility.starts_with("pub") || visibility.contains(['{', '=']) {
            continue;
        }
        let first = word(&code[at + "use ".len()..]);
        let head = if first == "self" { vec![] } else { vec![first.to_owned()] };
        tails(&code[at + "use ".len() + first.len()..], &head, &mut paths);
    }
    paths
}

/// Parses what follows the start of a path, `::name` or `::{...}`, and returns its length.
fn tails(text: &str, head: &[String], paths: &mut Vec<Vec<String>>) -> usize {
    let Some(rest) = text.strip_prefix("::") else {
        paths.push(head.to_owned());
        return 0;
    };
    let Some(group) = rest.strip_prefix('{') else {
        let name = word(rest);
        return 2 + name.len() + tails(&rest[name.len()..], &[head, &[name.to_owned()]].concat(), paths);
    };
    let mut at = 0;
    while let Some(next) = group[at..].chars().next() {
        if next == '}' {
            break;
        }
        let name = word(&group[at..]);
        at += match name {
            "" => next.len_utf8(),
            _ => name.len() + tails(&group[at + name.len()..], &[head, &[name.to_owned()]].concat(), paths),
        };
    }
    2 + 1 + at + 1
}

/// The word at the start of `text`, or an empty string.
fn word(text: &str) -> &str {
    &text[..text.find(|c| !is_word(c)).unwrap_or(text.len())]
}

/// A path in `module` as names from the crate's root; `None` if it leaves the crate.
pub(super) fn resolve(module: &[String], path: &[String]) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    let ups = rest.iter().take_while(|name| *name == "super").count();
    let own = match first.as_str() {
        "crate" => &[],
        "super" => module.get(..module.len().checked_sub(1 + ups)?)?,
        _ => module.get(..module.len().checked_sub(ups)?)?,
    };
    Some([own, rest.get(ups..)?].concat())
}

pub(super) fn is_module(tree: &Tree, parent: &str, name: &str) -> bool {
    tree.has(&format!("{parent}/{name}.rs")) || tree.has(&format!("{parent}/{name}/mod.rs"))
}
