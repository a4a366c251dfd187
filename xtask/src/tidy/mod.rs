//! Repository rules that the compiler does not check. A unit test runs them, too.
//!
//! Each check is a function from file contents to findings. It reads no disk, so tests can pass
//! their own files.

mod calls;
mod circles;
mod decisions;
mod folders;
mod imports;
mod manifests;
mod modules;
mod providers;
mod results;
mod seams;
mod source;
mod subjects;
mod text;
mod types;

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

/// Prints every finding.
///
/// # Errors
/// If there is a finding, or a file cannot be read.
pub(crate) fn run(root: &Path) -> Result<()> {
    let findings = findings(root)?;
    findings.iter().for_each(|finding| println!("{finding}"));
    if !findings.is_empty() {
        bail!("{} findings", findings.len());
    }
    Ok(())
}

/// Runs every check over the files and the commits of the repository at `root`.
///
/// # Errors
/// If a file cannot be read.
pub(crate) fn findings(root: &Path) -> Result<Vec<Finding>> {
    Ok([check(&Tree::read(root)?), subjects::check(&subjects::read(root))].concat())
}

/// Runs every check of files.
fn check(tree: &Tree) -> Vec<Finding> {
    [
        text::check(tree),
        calls::check(tree),
        modules::dead_sources(tree),
        modules::hidden_sources(tree),
        modules::beside_folder(tree),
        modules::undocumented(tree),
        modules::dead_data(tree),
        manifests::check(tree),
        folders::check(tree),
        circles::check(tree),
        decisions::check(tree),
        providers::check(tree),
        results::check(tree),
        seams::check(tree),
        types::declared_twice(tree),
        types::scattered(tree),
    ]
    .concat()
}

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    path: String,
    /// Line number, from 1.
    line: usize,
    /// The broken rule, and what to do instead.
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

/// The repository's files by path from its root. A file that is not UTF-8 has empty content.
#[derive(Default)]
pub(crate) struct Tree(BTreeMap<String, String>);

impl Tree {
    /// Reads all files below `root` except [`NOT_OURS`].
    ///
    /// # Errors
    /// If a file or directory cannot be read.
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
            // The reports of further benches are numbered.
            if NOT_OURS.contains(&path.as_str()) || path.starts_with("bench-results-") {
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

    /// Path and content of the files whose path ends with `end`.
    fn ending(&self, end: &str) -> impl Iterator<Item = (&str, &str)> {
        self.all().filter(move |(path, _)| path.ends_with(end))
    }

    fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(path, content)| (path.as_str(), content.as_str()))
    }

    /// The content of a file; empty if there is none.
    fn content(&self, path: &str) -> &str {
        self.0.get(path).map_or("", String::as_str)
    }

    /// Whether a file or a directory exists at `path`.
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

/// Paths not checked: git's own files, ignored build output, and fuzzer inputs (arbitrary bytes).
const NOT_OURS: &[&str] =
    &[".git", "target", "bench-results", "fuzz/target", "fuzz/artifacts", "fuzz/corpus", "fuzz/corpus-new"];

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a tree of these files.
    pub(super) fn tree(files: &[(&str, &str)]) -> Tree {
        Tree(files.iter().map(|(path, content)| ((*path).to_owned(), (*content).to_owned())).collect())
    }

    /// Path and line of each finding.
    pub(super) fn places(findings: &[Finding]) -> Vec<(&str, usize)> {
        findings.iter().map(|finding| (finding.path.as_str(), finding.line)).collect()
    }

    #[test]
    fn this_repository_is_tidy() {
        let findings = findings(crate::repository()).unwrap();
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
