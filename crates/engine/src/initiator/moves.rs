//! Where a link dials while its target sends it from one address to another.

use crate::socket::Address;

/// A target is elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Where.
    pub address: Address,
    /// For good, or only now.
    pub is_permanent: bool,
}

/// Where a target is asked for, and where it was said to be.
#[derive(Debug)]
pub(super) struct Moves {
    /// Where to begin.
    home: Address,
    /// Where it has sent us since, one after the other.
    visited: Vec<Address>,
    /// No move was only for now.
    is_permanent: bool,
}

/// Why a target is not followed, as half a sentence.
pub(super) type Problem = &'static str;

impl Moves {
    pub(super) fn from(home: Address) -> Moves {
        Moves { home, visited: Vec::new(), is_permanent: true }
    }

    /// Where to dial next.
    pub(super) fn address(&self) -> &Address {
        self.visited.last().unwrap_or(&self.home)
    }

    /// Where to begin, after all that moved for good.
    pub(super) fn home(&self) -> &Address {
        &self.home
    }

    /// Follows the target.
    ///
    /// # Errors
    /// If it was there already, or never stays.
    pub(super) fn follow(&mut self, moved: Move) -> Result<(), Problem> {
        let is_known = moved.address == self.home || self.visited.contains(&moved.address);
        if is_known {
            return Err("which has sent us on already");
        }
        if self.visited.len() >= MAX_MOVES {
            return Err("after more moves than are followed");
        }
        self.is_permanent &= moved.is_permanent;
        self.visited.push(moved.address);
        Ok(())
    }

    /// A session has begun where we are: what moved for good is the new begin.
    pub(super) fn settle(&mut self) {
        if self.is_permanent
            && let Some(last) = self.visited.pop()
        {
            self.home = last;
            self.visited.clear();
        }
    }

    /// Begins anew.
    pub(super) fn go_home(&mut self) {
        self.is_permanent = true;
        self.visited.clear();
    }
}

/// The most moves of one login.
pub(super) const MAX_MOVES: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Address {
        Address::Tcp(([127, 0, 0, 1], port).into())
    }

    fn to(port: u16, is_permanent: bool) -> Move {
        Move { address: at(port), is_permanent }
    }

    #[test]
    fn what_moved_for_now_is_asked_where_it_was_again() {
        let mut moves = Moves::from(at(1));
        moves.follow(to(2, false)).unwrap();
        assert_eq!(moves.address(), &at(2));
        moves.settle();
        assert_eq!((moves.address(), moves.home()), (&at(2), &at(1)));
        moves.go_home();
        assert_eq!(moves.address(), &at(1));
    }

    #[test]
    fn what_moved_for_good_is_asked_where_it_is() {
        let mut moves = Moves::from(at(1));
        moves.follow(to(2, true)).unwrap();
        moves.follow(to(3, true)).unwrap();
        moves.settle();
        moves.go_home();
        assert_eq!(moves.address(), &at(3));
        // A move for good that a move for now led to is as short-lived as that.
        moves.follow(to(4, false)).unwrap();
        moves.follow(to(5, true)).unwrap();
        moves.settle();
        moves.go_home();
        assert_eq!(moves.address(), &at(3));
    }

    #[test]
    fn circles_and_long_ways_are_left() {
        let mut moves = Moves::from(at(1));
        assert!(moves.follow(to(1, true)).is_err());
        (2..=5).for_each(|port| moves.follow(to(port, true)).unwrap());
        assert_eq!(moves.follow(to(3, false)), Err("which has sent us on already"));
        assert_eq!(moves.follow(to(6, false)), Err("after more moves than are followed"));
    }
}
