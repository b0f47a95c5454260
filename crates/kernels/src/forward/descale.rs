//! Descale factors of 8-bit inputs, one for each batch entry and KV head, or one for each block of rows.
//!
//! The factors of Q and K of a head, and its temperature, are multiplied with the factor of the scores, the
//! factor of V with the division by the row sums. With factors per block of rows, the main loop multiplies
//! the scores and the sums of each KV block ([`attend::ScoreFactors`], [`attend::ValueFactors`]).

use attend::{
    BlockFactors, OnlineSoftmax, ScoreFactors, ScorePrograms, Softcap, ValueFactors, accepted_score_factor,
};
use problem::{Operand, Problem, Tensor};
use ptx::{Builder, CmpOp, F32, Global, R32};

use crate::contract::Contract;

/// The factors of one tensor.
#[derive(Clone, Copy, Debug)]
struct Descale {
    start: Global,
    /// Elements between batch entries.
    batch: R32,
    /// Elements between KV heads.
    head: R32,
    blocks: Option<Blocks>,
}

/// The blocks of rows that have factors of their own.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    /// Elements between blocks.
    stride: R32,
    /// Rows of a block.
    rows: u32,
}

impl Descale {
    /// The factors of a tensor; `None` if it has none.
    fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem, tensor: Tensor) -> Option<Descale> {
        let (start, layout) = c.operand(k, Operand::Descale(tensor)).zip(problem.scales.of(tensor))?;
        let mut stride =
            |of: &str, elements: i64| c.u32(k, &format!("descale_{}_{of}", tensor.name()), elements as u32);
        let (batch, head) = (stride("batch", layout.batch), stride("head", layout.head));
        let blocks = layout.rows.map(|rows| Blocks { stride: stride("block", layout.block), rows });
        Some(Descale { start, batch, head, blocks })
    }

    /// The address of the first factor of a batch entry and a KV head.
    fn of_head(&self, k: &mut Builder, [batch, head]: [R32; 2]) -> Global {
        let before = k.mul_wide_u(batch, self.batch);
        let own = k.mul_wide_u(head, self.head);
        let index = k.add(before, own);
        let base = k.mad(index, 4, self.start.base);
        Global { base, offset: self.start.offset }
    }

    /// The factor of a batch entry and a KV head.
    fn load(&self, k: &mut Builder, at: [R32; 2]) -> F32 {
        let from = self.of_head(k, at);
        k.ld(from)
    }

    /// The factors of the blocks of a batch entry and a KV head; `None` without factors per block. `rows` is
    /// the number of rows that have factors, at least 1.
    fn blocks_of_head(&self, k: &mut Builder, at: [R32; 2], rows: R32) -> Option<BlockFactors> {
        let blocks = self.blocks?;
        Some(BlockFactors {
            first: self.of_head(k, at),
            stride: blocks.stride,
            rows: blocks.rows,
            last: k.sub(rows, 1),
        })
    }
}

/// The head of a tile's rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HeadPlace {
    pub batch: R32,
    pub key_head: R32,
    /// The query head; `None` if the rows of a tile belong to several.
    pub head: Option<R32>,
}

/// The factors of scores: those of Q and K, and the temperatures of query heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreDescale {
    inputs: [Option<Descale>; 2],
    temperature: Option<Global>,
}

/// A tile whose scores have factors per block of rows.
pub(crate) struct ScaledTile<'a> {
    pub at: HeadPlace,
    /// The positions of the lane's rows, or of groups of neighbouring rows that have one factor of Q.
    pub rows: &'a [R32],
    /// The numbers of queries and of keys that have factors.
    pub lengths: [R32; 2],
    /// The keys of a KV block that a warp multiplies.
    pub keys: u32,
    /// The factor of scores without descale factors; `None` if a softcap or a score program takes the scores
    /// before the exponent.
    pub factor: Option<F32>,
}

impl ScoreDescale {
    /// Declares the factors; `None` if there are none.
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem) -> Option<ScoreDescale> {
        let inputs = [Tensor::Q, Tensor::K].map(|tensor| Descale::declare(k, c, problem, tensor));
        let temperature = c.operand(k, Operand::Temperature);
        let some = temperature.is_some() || inputs.iter().any(Option::is_some);
        some.then_some(ScoreDescale { inputs, temperature })
    }

    /// Whether either tensor has factors per block of rows.
    pub fn is_per_block(&self) -> bool {
        self.inputs.iter().flatten().any(|of| of.blocks.is_some())
    }

    /// The product of the factors of a head; NaN if one is not accepted.
    pub fn load(&self, k: &mut Builder, at: HeadPlace) -> F32 {
        // All loads come before the first test, which waits.
        let [q, key] = self.inputs.map(|of| of.map(|of| of.load(k, [at.batch, at.key_head])));
        let factors = [q, key, self.load_temperature(k, at)];
        let factors = factors.map(|factor| factor.map(|factor| accepted_score_factor(k, factor)));
        factors.into_iter().flatten().reduce(|a, b| k.mul(a, b)).expect("a factor")
    }

    fn load_temperature(&self, k: &mut Builder, at: HeadPlace) -> Option<F32> {
        let (start, head) = self.temperature.zip(at.head)?;
        let from = k.index(start, head, 4);
        Some(k.ld(from))
    }

    /// The factors of a tile, if either tensor has factors per block of rows.
    pub fn of_tile(&self, k: &mut Builder, tile: &ScaledTile<'_>) -> Option<ScoreFactors> {
        if !self.is_per_block() {
            return None;
        }
        let (at, [seq_q, seq_kv], [q, key]) = ([tile.at.batch, tile.at.key_head], tile.lengths, self.inputs);
        let keys = key.and_then(|of| of.blocks_of_head(k, at, seq_kv));
        let of_keys = key.filter(|_| keys.is_none()).map(|of| {
            let factor = of.load(k, at);
            accepted_score_factor(k, factor)
        });
        let temperature = self.load_temperature(k, tile.at).map(|factor| accepted_score_factor(k, factor));
        let of_head = [of_keys, temperature].into_iter().flatten().reduce(|a, b| k.mul(a, b));
        let of_queries: Vec<F32> = match q {
            None => Vec::new(),
            Some(of) => match of.blocks_of_head(k, at, seq_q) {
                None => vec![of.load(k, at)],
                Some(blocks) => tile.rows.iter().map(|&row| blocks.load(k, row)).collect(),
            },
        };
        let of_queries = of_queries.into_iter().map(|factor| accepted_score_factor(k, factor));
        let of_queries: Vec<F32> = of_queries.collect();
        let of_rows = match (of_head, &of_queries[..]) {
            (None, _) => of_queries,
            (Some(of_head), []) => vec![of_head],
            (Some(of_head), _) => of_queries.iter().map(|&of_row| k.mul(of_row, of_head)).collect(),
        };
        let whole = keys.is_none_or(|keys| tile.keys <= keys.rows);
        Some(match tile.factor.filter(|_| whole) {
            Some(factor) => ScoreFactors::in_exponent(k, factor, of_rows, keys),
            None => ScoreFactors::on_scores(of_rows, keys),
        })
    }
}

/// The factors, the softcap and the programs that a kernel applies to its scores.
pub(crate) struct Scoring<'a> {
    pub descale: Option<ScoreDescale>,
    /// The factor of scores in the exponent.
    pub factor: F32,
    pub softcap: Option<&'a Softcap>,
    pub programs: Option<&'a ScorePrograms>,
}

/// A kernel whose Q and K may have descale factors.
pub(crate) trait Scores {
    fn scoring(&self) -> Scoring<'_>;

    /// The factors of the scores, if the factors of Q and K are those of heads.
    fn head_descale(&self) -> Option<ScoreDescale> {
        self.scoring().descale.filter(|descale| !descale.is_per_block())
    }

    /// The factor of scores without descale factors, if nothing takes the scores before the exponent: neither
    /// a softcap nor a score program. Then the exponent has the descale factors.
    fn exponent_factor(&self) -> Option<F32> {
        let Scoring { factor, softcap, programs, .. } = self.scoring();
        let shaped = softcap.is_some() || programs.is_some_and(ScorePrograms::shapes_scores);
        (!shaped).then_some(factor)
    }

    /// After the last block of a tile, makes the rows NaN that have seen a key, if the exponent has a factor
    /// of the tile's head that is not accepted.
    fn spoil_seen(&self, k: &mut Builder, softmax: &OnlineSoftmax, factor: F32) {
        if self.head_descale().is_some() && self.exponent_factor().is_some() {
            let refused = k.setp_f(CmpOp::Lt, factor, LEAST);
            softmax.spoil_seen(k, refused);
        }
    }
}

/// The smallest factor of scores in the exponent. A factor of 0 would turn the −∞ of masked scores into
/// NaN.
const LEAST: f32 = 2.0 * f32::MIN_POSITIVE;
/// The factor of scores that replaces NaN in the exponent: NaN would reach rows that see no key.
const REFUSED: f32 = f32::MIN_POSITIVE;

/// `factor · descale`, the factor of scores in the exponent, or [`REFUSED`] if `descale` is NaN.
pub(crate) fn descaled(k: &mut Builder, factor: F32, descale: F32) -> F32 {
    let refused = k.setp_f(CmpOp::Neu, descale, descale);
    let factor = k.mul(factor, descale);
    k.max_to(factor, factor, LEAST);
    k.selp(REFUSED, factor, refused)
}

/// The factors of V.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueDescale(Descale);

impl ValueDescale {
    /// Declares the factors; `None` if V has no factors.
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem) -> Option<ValueDescale> {
        Descale::declare(k, c, problem, Tensor::V).map(ValueDescale)
    }

    /// Whether V has factors per block of rows.
    pub fn is_per_block(&self) -> bool {
        self.0.blocks.is_some()
    }

    /// The factor of a batch entry and a KV head.
    pub fn load(&self, k: &mut Builder, at: [R32; 2]) -> F32 {
        self.0.load(k, at)
    }

    /// The factors of the blocks of a batch entry and a KV head; `None` without factors per block of rows.
    /// `keys` is the number of keys that have factors, at least 1.
    pub fn blocks(&self, k: &mut Builder, at: [R32; 2], keys: R32) -> Option<ValueFactors> {
        self.0.blocks_of_head(k, at, keys).map(ValueFactors)
    }
}
