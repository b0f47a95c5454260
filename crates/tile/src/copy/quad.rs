//! Exchanges of words within a quad of lanes.

use ptx::{Builder, CmpOp, Pred, R32};

/// A transposition of 4×4 words within a quad, of which each lane holds one column. Single words are
/// exchanged with the neighbouring lane, then pairs of words with the lane two further on.
#[derive(Clone, Copy, Debug)]
pub struct QuadTransposition {
    /// For each step, the distance to the other lane, and whether this lane is the upper one.
    steps: [(u32, Pred); 2],
}

impl QuadTransposition {
    /// For a lane whose index in the quad is half of `column`.
    pub fn new(k: &mut Builder, column: R32) -> QuadTransposition {
        let steps = [1, 2].map(|distance| {
            let bit = k.and(column, 2 * distance);
            (distance, k.setp_u(CmpOp::Ne, bit, 0))
        });
        QuadTransposition { steps }
    }

    /// The lane's column of the transposed words, in new registers.
    pub fn apply(&self, k: &mut Builder, mut words: [R32; 4]) -> [R32; 4] {
        self.exchange(k, &mut words, |k, word, [upper, lower], is_upper| {
            *word = k.selp(upper, lower, is_upper);
        });
        words
    }

    /// Like [`QuadTransposition::apply`], in the same registers.
    pub fn apply_in_place(&self, k: &mut Builder, mut words: [R32; 4]) {
        self.exchange(k, &mut words, |k, word, [upper, lower], is_upper| {
            k.selp_to(*word, upper, lower, is_upper);
        });
    }

    /// Runs the steps. `select` sets a word to the first of two words in the upper lane of a pair of lanes,
    /// to the second one in the lower lane.
    fn exchange(
        &self,
        k: &mut Builder,
        words: &mut [R32; 4],
        select: impl Fn(&mut Builder, &mut R32, [R32; 2], Pred),
    ) {
        for (distance, is_upper) in self.steps {
            for low in (0..4).filter(|word| word & distance as usize == 0) {
                let high = low | distance as usize;
                let [a, b] = [words[low], words[high]];
                let sent = k.selp(a, b, is_upper);
                let received = k.shfl_xor(sent, distance);
                select(k, &mut words[low], [received, a], is_upper);
                select(k, &mut words[high], [b, received], is_upper);
            }
        }
    }
}
