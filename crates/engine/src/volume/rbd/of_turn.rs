//! What a volume has for one turn, such as its image.

use std::mem;

/// What belongs to one turn. A call of an earlier one may return late, when the cluster answers
/// again, and replaces nothing then: turns have ascending numbers
/// ([`Transition::number`](blockmux_proto::volume_state::Transition::number)).
pub(super) struct OfTurn<T> {
    turn: u64,
    value: T,
}

impl<T> OfTurn<T> {
    /// What there is before the first turn.
    pub(super) fn new(value: T) -> OfTurn<T> {
        OfTurn { turn: 0, value }
    }

    pub(super) fn get(&self) -> &T {
        &self.value
    }

    /// Makes the present value that of this turn, too. Returns whether no later turn has it.
    pub(super) fn enter(&mut self, turn: u64) -> bool {
        self.turn = self.turn.max(turn);
        self.turn == turn
    }

    /// Replaces the value; returns the one before, or, if a later turn has that, the new one.
    pub(super) fn replace(&mut self, turn: u64, value: T) -> Result<T, T> {
        if !self.enter(turn) {
            return Err(value);
        }
        Ok(mem::replace(&mut self.value, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_turn_replaces_nothing() {
        let mut own = OfTurn::new('a');
        assert_eq!((own.replace(0, 'b'), own.replace(3, 'c')), (Ok('a'), Ok('b')));
        assert_eq!((own.replace(2, 'd'), *own.get()), (Err('d'), 'c'));
        assert!(own.enter(3) && own.enter(4) && !own.enter(3));
        assert_eq!((own.replace(3, 'd'), own.replace(4, 'e')), (Err('d'), Ok('c')));
    }
}
