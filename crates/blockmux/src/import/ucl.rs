//! The newer form of `ctl.conf`, in UCL, as statements of the older one.
//!
//! Values are words, lists in brackets, or blocks in braces; `=` or `:` may be between a key and
//! its value, and `,` or `;` behind it. Groups, LUNs and targets are named by a second key or by a
//! nested block.

use super::tree::{MAX_DEPTH, MAX_STATEMENTS, Statement, SyntaxError};
use zeroize::Zeroizing;

/// Reads a text as statements of the older form.
pub(super) fn statements(text: &str) -> Result<Vec<Statement>, SyntaxError> {
    let mut reader = Reader { rest: text, line: 1, count: 0 };
    let members = reader.members(0, None)?;
    Ok(members.into_iter().flat_map(top_level).collect())
}

/// A key with its value.
struct Member {
    line: usize,
    key: Zeroizing<String>,
    value: UclValue,
}

enum UclValue {
    Word(Zeroizing<String>),
    List(Vec<UclValue>),
    Block(Vec<Member>),
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    count: usize,
}

impl Reader<'_> {
    /// Members up to the end of the block, or of the text.
    fn members(&mut self, depth: usize, end: Option<char>) -> Result<Vec<Member>, SyntaxError> {
        let mut members = Vec::new();
        loop {
            self.skip(&[',', ';']);
            match self.rest.chars().next() {
                None if end.is_none() => return Ok(members),
                None => return Err(self.wrong("a block does not end; write a } behind it")),
                Some(c) if Some(c) == end => {
                    self.take();
                    return Ok(members);
                }
                Some(_) => {}
            }
            let line = self.line;
            let key = self.word()?;
            self.skip(&['=', ':']);
            let value = self.value(depth)?;
            members.push(Member { line, key, value });
        }
    }

    fn value(&mut self, depth: usize) -> Result<UclValue, SyntaxError> {
        self.count += 1;
        if self.count > MAX_STATEMENTS || depth >= MAX_DEPTH {
            return Err(self.wrong("too many values, or too many blocks are nested"));
        }
        match self.rest.chars().next() {
            Some('{') => {
                self.take();
                Ok(UclValue::Block(self.members(depth + 1, Some('}'))?))
            }
            Some('[') => {
                self.take();
                let mut items = Vec::new();
                loop {
                    self.skip(&[',']);
                    match self.rest.chars().next() {
                        Some(']') => {
                            self.take();
                            return Ok(UclValue::List(items));
                        }
                        None => return Err(self.wrong("a list does not end; write a ] behind it")),
                        Some(_) => items.push(self.value(depth + 1)?),
                    }
                }
            }
            _ => {
                let line = self.line;
                let word = self.word()?;
                // `auth-group ag0 { ... }`: the word is a second key.
                self.skip(&[]);
                if !self.rest.starts_with('{') {
                    return Ok(UclValue::Word(word));
                }
                let value = self.value(depth + 1)?;
                Ok(UclValue::Block(vec![Member { line, key: word, value }]))
            }
        }
    }

    /// A word, which may be in quotes.
    fn word(&mut self) -> Result<Zeroizing<String>, SyntaxError> {
        if let Some(quoted) = self.rest.strip_prefix(['"', '\'']) {
            let quote = if self.rest.starts_with('"') { '"' } else { '\'' };
            let Some((word, rest)) = quoted.split_once(quote) else {
                return Err(self.wrong("a quoted text does not end; write its quote behind it"));
            };
            self.line += word.matches('\n').count();
            self.rest = rest;
            return Ok(Zeroizing::new(word.to_owned()));
        }
        let ends = |c: char| c.is_whitespace() || "{}[],;=\"".contains(c);
        let len = self.rest.find(ends).unwrap_or(self.rest.len());
        if len == 0 {
            return Err(self.wrong("a name or a value is missing here"));
        }
        let (word, rest) = self.rest.split_at(len);
        self.rest = rest;
        Ok(Zeroizing::new(word.trim_end_matches(':').to_owned()))
    }

    fn take(&mut self) {
        let mut chars = self.rest.chars();
        if chars.next() == Some('\n') {
            self.line += 1;
        }
        self.rest = chars.as_str();
    }

    /// Skips blanks, comments and these characters.
    fn skip(&mut self, others: &[char]) {
        while let Some(c) = self.rest.chars().next() {
            if c == '#' {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.rest = &self.rest[end..];
            } else if c.is_whitespace() || others.contains(&c) {
                self.take();
            } else {
                return;
            }
        }
    }

    fn wrong(&self, what: &str) -> SyntaxError {
        SyntaxError { line: self.line, what: what.to_owned() }
    }
}

fn statement(line: usize, words: Vec<Zeroizing<String>>, block: Option<Vec<Statement>>) -> Statement {
    let is_block = block.is_some();
    Statement { line, words, below: block.unwrap_or_default(), is_block }
}

/// Groups, LUNs and targets, each with its name; other members.
fn top_level(Member { line, key, value }: Member) -> Vec<Statement> {
    match value {
        UclValue::Block(named) => named
            .into_iter()
            .map(|one| {
                let below = match one.value {
                    UclValue::Block(members) => members.into_iter().flat_map(inner).collect(),
                    _ => Vec::new(),
                };
                statement(one.line, vec![key.clone(), one.key], Some(below))
            })
            .collect(),
        value => inner(Member { line, key, value }),
    }
}

/// Statements of a group, a LUN or a target.
fn inner(Member { line, key, value }: Member) -> Vec<Statement> {
    match value {
        UclValue::Word(word) => vec![statement(line, vec![key, word], None)],
        // Nothing is lost silently: a statement without words says that there was one.
        UclValue::List(items) if items.is_empty() => vec![statement(line, vec![key], None)],
        UclValue::Block(members) if members.is_empty() => vec![statement(line, vec![key], None)],
        UclValue::List(items) => {
            let one = |value| inner(Member { line, key: key.clone(), value });
            items.into_iter().flat_map(one).collect()
        }
        UclValue::Block(members) => block(line, key, members),
    }
}

fn block(line: usize, key: Zeroizing<String>, mut members: Vec<Member>) -> Vec<Statement> {
    let mut word = |names: &[&str]| {
        let at = members.iter().position(|member| names.contains(&member.key.as_str()))?;
        match members.remove(at).value {
            UclValue::Word(word) => Some(word),
            _ => None,
        }
    };
    let names: &[&[&str]] = match key.as_str() {
        "chap" => &[&["user"], &["secret"]],
        "chap-mutual" => {
            &[&["user"], &["secret"], &["mutual-user", "mutual_user"], &["mutual-secret", "mutual_secret"]]
        }
        "portal-group" => &[&["name"], &["auth-group-name", "auth-group"]],
        "lun" => &[&["number"], &["name"]],
        _ => &[],
    };
    let mut words = vec![key.clone()];
    words.extend(names.iter().filter_map(|names| word(names)));
    if words.len() > 1 {
        return vec![statement(line, words, None)];
    }
    let of_member = |Member { line, key: own, value }: Member| match (key.as_str(), value) {
        ("options" | "option", UclValue::Word(value)) => {
            statement(line, vec![Zeroizing::new("option".to_owned()), own, value], None)
        }
        (_, UclValue::Word(value)) => statement(line, vec![key.clone(), own, value], None),
        (_, UclValue::Block(members)) => {
            let below = members.into_iter().flat_map(inner).collect();
            statement(line, vec![key.clone(), own], Some(below))
        }
        (_, UclValue::List(_)) => statement(line, vec![key.clone(), own], None),
    };
    members.into_iter().map(of_member).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tree::tests::shown;
    use super::*;

    #[test]
    fn members_become_statements_of_the_older_form() {
        let text = "debug = 1; auth-group ag0 {\n auth-type: none # x\n}\nportal-group {\n pg0 { listen = [\"[::]:3260\", 0.0.0.0] }\n}\n\
                    target { 'iqn.a:b' {\n chap = [{ user = joe, secret = \"a secret\" }]\n portal-group { name = pg0 }\n\
                    lun = [ { number = 0, name = x }, ]\n options { foo = bar } } }\ntarget \"iqn.c\" { lun { 1 { path /x } 2 = y } }";
        let expected = "1:debug,1 1:auth-group,ag0(2:auth-type,none) 5:portal-group,pg0(5:listen,[::]:3260 5:listen,0.0.0.0) \
                        7:target,iqn.a:b(8:chap,joe,a secret 9:portal-group,pg0 10:lun,0,x 11:option,foo,bar) \
                        12:target,iqn.c(12:lun,1(12:path,/x) 12:lun,2,y)";
        assert_eq!(shown(&statements(text).unwrap()), expected);
    }

    #[test]
    fn an_error_names_its_line() {
        for (text, line) in [("a = {\n", 2), ("a = [\n1", 2), ("\na = \"b", 2), ("\n=", 2), ("a\n}", 2)] {
            assert_eq!(statements(text).err().map(|error| error.line), Some(line), "{text}");
        }
        assert_eq!(statements(&"a {".repeat(10_000)).err().map(|error| error.line), Some(1));
    }
}
