//! The address that a link dials while its target redirects it.

use crate::socket::Address;

/// A redirection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The new address.
    pub address: Address,
    /// Whether the redirection is permanent; otherwise it is temporary.
    pub is_permanent: bool,
}

/// The configured address, and the redirections followed since.
#[derive(Debug)]
pub(super) struct Moves {
    /// The address to start from.
    initial: Address,
    /// Addresses of the redirections followed since, in order.
    visited: Vec<Address>,
    /// All redirections so far were permanent.
    is_permanent: bool,
}

/// Why a redirection is not followed, as half a sentence.
pub(super) type Problem = &'static str;

impl Moves {
    pub(super) fn from(initial: Address) -> Moves {
        Moves { initial, visited: Vec::new(), is_permanent: true }
    }

    /// The address to dial next.
    pub(super) fn address(&self) -> &Address {
        self.visited.last().unwrap_or(&self.initial)
    }

    /// The address to start from, after permanent redirections.
    pub(super) fn initial(&self) -> &Address {
        &self.initial
    }

    /// Follows a redirection.
    ///
    /// # Errors
    /// If the address was visited before, or after [`MAX_MOVES`] redirections.
    pub(super) fn follow(&mut self, moved: Move) -> Result<(), Problem> {
        let is_known = moved.address == self.initial || self.visited.contains(&moved.address);
        if is_known {
            return Err("which was already visited: a redirection loop");
        }
        if self.visited.len() >= MAX_MOVES {
            return Err("after 4 redirections, the limit");
        }
        self.is_permanent &= moved.is_permanent;
        self.visited.push(moved.address);
        Ok(())
    }

    /// Records that a session has logged in at the current address: permanent redirections become
    /// the initial address.
    pub(super) fn settle(&mut self) {
        if self.is_permanent
            && let Some(last) = self.visited.pop()
        {
            self.initial = last;
            self.visited.clear();
        }
    }

    /// Starts over at the initial address.
    pub(super) fn restart(&mut self) {
        self.is_permanent = true;
        self.visited.clear();
    }
}

/// Maximum number of redirections of one login.
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
    fn a_temporary_redirection_returns_to_the_initial_address() {
        let mut moves = Moves::from(at(1));
        moves.follow(to(2, false)).unwrap();
        assert_eq!(moves.address(), &at(2));
        moves.settle();
        assert_eq!((moves.address(), moves.initial()), (&at(2), &at(1)));
        moves.restart();
        assert_eq!(moves.address(), &at(1));
    }

    #[test]
    fn a_permanent_redirection_changes_the_initial_address() {
        let mut moves = Moves::from(at(1));
        moves.follow(to(2, true)).unwrap();
        moves.follow(to(3, true)).unwrap();
        moves.settle();
        moves.restart();
        assert_eq!(moves.address(), &at(3));
        // A permanent redirection that follows a temporary one is temporary, too.
        moves.follow(to(4, false)).unwrap();
        moves.follow(to(5, true)).unwrap();
        moves.settle();
        moves.restart();
        assert_eq!(moves.address(), &at(3));
    }

    #[test]
    fn redirection_loops_and_long_chains_are_refused() {
        let mut moves = Moves::from(at(1));
        assert!(moves.follow(to(1, true)).is_err());
        (2..=5).for_each(|port| moves.follow(to(port, true)).unwrap());
        assert_eq!(moves.follow(to(3, false)), Err("which was already visited: a redirection loop"));
        assert_eq!(moves.follow(to(6, false)), Err("after 4 redirections, the limit"));
    }
}
