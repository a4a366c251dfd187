//! The address that a link dials while its target redirects it.

use crate::net::socket::Address;

/// A redirection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirection {
    /// The new address.
    pub address: Address,
    /// Whether the redirection is permanent; otherwise it is temporary.
    pub is_permanent: bool,
}

/// The configured address, and the redirections followed since.
#[derive(Debug)]
pub(crate) struct Redirections {
    /// The address to start from.
    pub(crate) initial: Address,
    /// Addresses of the redirections followed since, in order.
    visited: Vec<Address>,
    /// All redirections so far were permanent.
    is_permanent: bool,
}

impl Redirections {
    pub(crate) fn from(initial: Address) -> Redirections {
        Redirections { initial, visited: Vec::new(), is_permanent: true }
    }

    /// The address to dial next.
    pub(crate) fn address(&self) -> &Address {
        self.visited.last().unwrap_or(&self.initial)
    }

    /// Follows a redirection.
    ///
    /// # Errors
    /// If the address was visited before, or after [`MAX_REDIRECTIONS`] redirections.
    pub(crate) fn follow(&mut self, moved: Redirection) -> Result<(), &'static str> {
        let is_known = moved.address == self.initial || self.visited.contains(&moved.address);
        if is_known {
            return Err("which was already visited: a redirection loop");
        }
        if self.visited.len() >= MAX_REDIRECTIONS {
            return Err("after 4 redirections, the limit");
        }
        self.is_permanent &= moved.is_permanent;
        self.visited.push(moved.address);
        Ok(())
    }

    /// Records that a session has logged in at the current address: permanent redirections become
    /// the initial address.
    pub(crate) fn settle(&mut self) {
        if self.is_permanent
            && let Some(last) = self.visited.pop()
        {
            self.initial = last;
            self.visited.clear();
        }
    }

    /// Starts over at the initial address.
    pub(crate) fn restart(&mut self) {
        self.is_permanent = true;
        self.visited.clear();
    }
}

/// Maximum number of redirections of one login.
pub(crate) const MAX_REDIRECTIONS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Address {
        Address::Tcp(([127, 0, 0, 1], port).into())
    }

    fn to(port: u16, is_permanent: bool) -> Redirection {
        Redirection { address: at(port), is_permanent }
    }

    #[test]
    fn a_temporary_redirection_returns_to_the_initial_address() {
        let mut redirections = Redirections::from(at(1));
        redirections.follow(to(2, false)).unwrap();
        assert_eq!(redirections.address(), &at(2));
        redirections.settle();
        assert_eq!((redirections.address(), &redirections.initial), (&at(2), &at(1)));
        redirections.restart();
        assert_eq!(redirections.address(), &at(1));
    }

    #[test]
    fn a_permanent_redirection_changes_the_initial_address() {
        let mut redirections = Redirections::from(at(1));
        redirections.follow(to(2, true)).unwrap();
        redirections.follow(to(3, true)).unwrap();
        redirections.settle();
        redirections.restart();
        assert_eq!(redirections.address(), &at(3));
        // A permanent redirection that follows a temporary one is temporary, too.
        redirections.follow(to(4, false)).unwrap();
        redirections.follow(to(5, true)).unwrap();
        redirections.settle();
        redirections.restart();
        assert_eq!(redirections.address(), &at(3));
    }

    #[test]
    fn redirection_loops_and_long_chains_are_refused() {
        let mut redirections = Redirections::from(at(1));
        assert!(redirections.follow(to(1, true)).is_err());
        (2..=5).for_each(|port| redirections.follow(to(port, true)).unwrap());
        assert_eq!(redirections.follow(to(3, false)), Err("which was already visited: a redirection loop"));
        assert_eq!(redirections.follow(to(6, false)), Err("after 4 redirections, the limit"));
    }
}
