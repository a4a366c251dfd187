//! The form of commit subjects: `area: imperative change`.

use super::Finding;
use std::path::Path;
use std::process::Command;

/// A commit that is not on the remote's main branch.
pub(super) struct Commit {
    /// Abbreviated hash.
    hash: String,
    subject: String,
}

/// The commits on HEAD that `origin/main` lacks, or the last [`LAST`] if there is no `origin/main`.
/// Empty without git, outside a repository and in a shallow clone: there is no history to check.
pub(super) fn read(root: &Path) -> Vec<Commit> {
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    if git(&["rev-parse", "--is-shallow-repository"]).is_none_or(|answer| answer.trim() != "false") {
        return Vec::new();
    }
    let format = "--format=%h %s";
    let log = git(&["log", "--no-merges", format, "origin/main..HEAD"])
        .or_else(|| git(&["log", "--no-merges", format, LAST, "HEAD"]));
    let commit = |line: &str| {
        let (hash, subject) = line.split_once(' ').unwrap_or((line, ""));
        Commit { hash: hash.to_owned(), subject: subject.to_owned() }
    };
    log.unwrap_or_default().lines().map(commit).collect()
}

/// Reports every commit whose subject breaks a rule.
pub(super) fn check(commits: &[Commit]) -> Vec<Finding> {
    let finding = |commit: &Commit| {
        let what = fault(&commit.subject)?;
        Some(Finding::new(&format!("commit {}", commit.hash), 1, format!("\"{}\": {what}", commit.subject)))
    };
    commits.iter().filter_map(finding).collect()
}

/// The rule that a subject breaks, with what to do; `None` if it is correct.
fn fault(subject: &str) -> Option<String> {
    if subject.starts_with("Revert \"") {
        return None;
    }
    let len = subject.chars().count();
    if len > MAX_SUBJECT {
        return Some(format!("{len} characters, {MAX_SUBJECT} allowed; shorten it"));
    }
    let is_area = |area: &str| {
        !area.is_empty()
            && area.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_/., ".contains(c))
    };
    let Some((_, change)) = subject.split_once(": ").filter(|(area, _)| is_area(area)) else {
        return Some("the subject has no area; write \"area: imperative change\"".to_owned());
    };
    let verb = change.split(' ').next().unwrap_or_default();
    let is_sentence = verb.starts_with(|c: char| c.is_uppercase()) && verb.chars().any(char::is_lowercase);
    if verb.is_empty() || is_sentence || change.ends_with('.') {
        return Some("the change begins with a capital letter, ends with a full stop or is empty; write \"area: imperative change\"".to_owned());
    }
    let is_imperative = IMPERATIVE.contains(&verb) || !["ed", "ing"].iter().any(|end| verb.ends_with(end));
    (!is_imperative)
        .then(|| format!("\"{verb}\" is not an imperative; write \"add\", not \"added\" or \"adding\""))
}

/// Option of `git log` that limits the checked commits if there is no `origin/main`.
const LAST: &str = "-30";

/// Length of a subject, in characters.
const MAX_SUBJECT: usize = 72;

/// Imperatives that end like a participle.
const IMPERATIVE: &[&str] = &["bring", "embed", "feed", "need", "ping", "seed", "shed", "speed"];

#[cfg(test)]
mod tests {
    use super::*;

    fn is_accepted(subject: &str) -> bool {
        let commit = Commit { hash: "1a2b3c4".to_owned(), subject: subject.to_owned() };
        check(&[commit]).is_empty()
    }

    #[test]
    fn a_subject_names_an_area_and_an_imperative_change() {
        for good in ["nvme-tcp: accept an empty HOSTNQN", "bench, lab: feed units", "Revert \"Any: thing.\""]
        {
            assert!(is_accepted(good), "{good}");
        }
        for bad in [
            "",
            "accept an empty HOSTNQN",
            "Nvme: accept an empty HOSTNQN",
            "nvme:accept an empty HOSTNQN",
            "nvme: Accept an empty HOSTNQN",
            "nvme: accept an empty HOSTNQN.",
            "nvme: accepted an empty HOSTNQN",
            "nvme: accepting an empty HOSTNQN",
        ] {
            assert!(!is_accepted(bad), "{bad}");
        }
    }

    #[test]
    fn a_subject_has_at_most_72_characters() {
        let longest = format!("a: {}", "x".repeat(MAX_SUBJECT - 3));
        assert!(is_accepted(&longest));
        assert!(!is_accepted(&format!("{longest}x")));
    }

    #[test]
    fn a_directory_without_history_has_no_subjects() {
        let directory = tempfile::tempdir().unwrap();
        assert!(read(directory.path()).is_empty());
    }
}
