//! The rules of this repository that no compiler knows. They run as a unit test, too.
//!
//! Every check is a function from files to findings: it reads no disk, so a test gives it files of
//! its own.

mod calls;
mod cycles;
mod manifests;
mod modules;
mod source;
mod text;

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

/// Prints every finding.
///
/// # Errors
/// If there are any.
pub(crate) fn run(root: &Path) -> Result<()> {
    let findings = check(&Tree::read(root)?);
    findings.iter().for_each(|finding| println!("{finding}"));
    if !findings.is_empty() {
        bail!("{} findings", findings.len());
    }
    Ok(())
}

/// Every check, over all files.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    [
        text::check(tree),
        calls::check(tree),
        modules::dead_sources(tree),
        modules::hidden_sources(tree),
        modules::undocumented(tree),
        modules::dead_data(tree),
        manifests::check(tree),
        cycles::check(tree),
    ]
    .concat()
}

/// Something to mend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    path: String,
    /// From 1.
    line: usize,
    /// What is wrong, and what to do instead.
    what: String,
}

impl Finding {
    fn new(path: &str, line: usize, what: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// The repository's files, by their path from its root. What is not text is there with empty
/// content.
#[derive(Default)]
pub(crate) struct Tree(BTreeMap<String, String>);

impl Tree {
    /// Reads what belongs to the repository; see [`NOT_OURS`].
    ///
    /// # Errors
    /// If something cannot be read.
    pub(crate) fn read(root: &Path) -> Result<Tree> {
        let mut tree = Tree::default();
        tree.read_directory(root, "")?;
        Ok(tree)
    }

    fn read_directory(&mut self, root: &Path, directory: &str) -> Result<()> {
        let entries = fs::read_dir(root.join(directory)).with_context(|| directory.to_owned())?;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if directory.is_empty() { name } else { format!("{directory}/{name}") };
            if NOT_OURS.contains(&path.as_str()) {
                continue;
            }
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.read_directory(root, &path)?;
            } else if kind.is_file() {
                let bytes = fs::read(entry.path()).with_context(|| path.clone())?;
                self.0.insert(path, String::from_utf8(bytes).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Path and content of the files whose names end so.
    fn ending(&self, end: &str) -> impl Iterator<Item = (&str, &str)> {
        self.all().filter(move |(path, _)| path.ends_with(end))
    }

    fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(path, content)| (path.as_str(), content.as_str()))
    }

    /// Whether there is a file or a directory at `path`.
    fn has(&self, path: &str) -> bool {
        let directory = format!("{path}/");
        path.is_empty()
            || self.0.contains_key(path)
            || self
                .0
                .range(directory.clone()..)
                .next()
                .is_some_and(|(first, _)| first.starts_with(&directory))
    }
}

/// Not checked: what git ignores, git itself, and inputs of fuzzers, which are any bytes.
const NOT_OURS: &[&str] =
    &[".git", "target", "bench-results", "fuzz/target", "fuzz/artifacts", "fuzz/corpus", "fuzz/corpus-new"];

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of these files.
    pub(super) fn tree(files: &[(&str, &str)]) -> Tree {
        Tree(files.iter().map(|(path, content)| ((*path).to_owned(), (*content).to_owned())).collect())
    }

    /// Where findings are, without their words.
    pub(super) fn places(findings: &[Finding]) -> Vec<(&str, usize)> {
        findings.iter().map(|finding| (finding.path.as_str(), finding.line)).collect()
    }

    #[test]
    fn this_repository_is_tidy() {
        let findings = check(&Tree::read(crate::repository()).unwrap());
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert!(lines.is_empty(), "\n{}", lines.join("\n"));
    }

    #[test]
    fn a_tree_knows_its_directories() {
        let tree = tree(&[("docs/a/b.md", "")]);
        assert!(["", "docs", "docs/a", "docs/a/b.md"].iter().all(|path| tree.has(path)));
        assert!(["doc", "docs/a/b", "docs/b"].iter().all(|path| !tree.has(path)));
    }
}
