//! Kinds of operation, for rules and logs that ignore an operation's flags.

use crate::io::Op;
use std::fmt;

/// An [`Op`] without its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// [`Op::Read`]
    Read,
    /// [`Op::Write`], and [`Op::CompareAndWrite`], which writes if it can
    Write,
    /// [`Op::Flush`]
    Flush,
    /// [`Op::WriteZeroes`]
    WriteZeroes,
    /// [`Op::Discard`]
    Discard,
    /// [`Op::Prefetch`]
    Prefetch,
    /// [`Op::BlockStatus`]
    BlockStatus,
}

impl OpKind {
    /// All kinds.
    pub const ALL: [OpKind; 7] = [
        OpKind::Read,
        OpKind::Write,
        OpKind::Flush,
        OpKind::WriteZeroes,
        OpKind::Discard,
        OpKind::Prefetch,
        OpKind::BlockStatus,
    ];

    /// The kind of `op`.
    #[must_use]
    pub fn of(op: Op) -> OpKind {
        match op {
            Op::Read => OpKind::Read,
            Op::Write { .. } | Op::CompareAndWrite { .. } => OpKind::Write,
            Op::Flush => OpKind::Flush,
            Op::WriteZeroes { .. } => OpKind::WriteZeroes,
            Op::Discard { .. } => OpKind::Discard,
            Op::Prefetch => OpKind::Prefetch,
            Op::BlockStatus => OpKind::BlockStatus,
        }
    }

    /// Its name in volume specs and logs: one lower-case word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            OpKind::Read => "read",
            OpKind::Write => "write",
            OpKind::Flush => "flush",
            OpKind::WriteZeroes => "zeroes",
            OpKind::Discard => "discard",
            OpKind::Prefetch => "prefetch",
            OpKind::BlockStatus => "status",
        }
    }
}

/// A set of kinds; prints as names joined by `+`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpSet(u8);

impl OpSet {
    /// Every kind.
    pub const ALL: OpSet = OpSet((1 << OpKind::ALL.len()) - 1);
    /// No kind.
    pub const NONE: OpSet = OpSet(0);

    /// This set and `kind`.
    #[must_use]
    pub fn with(self, kind: OpKind) -> OpSet {
        OpSet(self.0 | 1 << kind as u8)
    }

    /// Whether `kind` is in it.
    #[inline]
    #[must_use]
    pub fn has(self, kind: OpKind) -> bool {
        self.0 & 1 << kind as u8 != 0
    }
}

impl fmt::Display for OpSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for kind in OpKind::ALL.into_iter().filter(|&kind| self.has(kind)) {
            write!(f, "{separator}{}", kind.name())?;
            separator = "+";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_contains_the_kinds_added_to_it() {
        let set = OpSet::NONE.with(OpKind::BlockStatus).with(OpKind::Read);
        assert_eq!(set.to_string(), "read+status");
        assert!(OpKind::ALL.into_iter().all(|kind| OpSet::ALL.has(kind) && !OpSet::NONE.has(kind)));
        assert!(!set.has(OpKind::Write));
    }
}
