//! The optional parts of a call besides Q, K and V, as the package describes them: lengths, sinks, programs
//! and their tables.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use problem::{
    ElementType, Lengths, OperandSpec, Problem, Program, Programs, ScaleLayout, Scales, SideLengths, Table,
};

use crate::error::Error;

/// Batch entries, the longest sequence of queries and of keys, and the addresses of `cu_seqlens_q`,
/// `cu_seqlens_k`, `seqused_q`, `seqused_k` and `leftpad_k`, each of 32-bit integers.
pub type DescribedLengths = (usize, usize, usize, [Option<usize>; 5]);

/// Address, type, extents and strides in elements.
pub type DescribedTable = (usize, TypeCode, Vec<usize>, Vec<i64>);

/// Index in [`TYPES`].
type TypeCode = u8;

/// The element types of tables, in the order of their codes.
const TYPES: [ElementType; 5] =
    [ElementType::F32, ElementType::F16, ElementType::Bf16, ElementType::I32, ElementType::U8];

/// Lengths, the address of the sinks, the texts of the score and of the mask program (empty: none), the
/// values of float and integer parameters, the tables, and the descale factors of Q, K and V.
pub type Described = (
    Option<DescribedLengths>,
    Option<usize>,
    String,
    String,
    Vec<f32>,
    Vec<i32>,
    Vec<DescribedTable>,
    [Option<DescribedScales>; 3],
);

/// Address, strides of batch entries, KV heads and blocks of rows in elements, and the rows of a block (0:
/// one factor per KV head).
pub type DescribedScales = (usize, [i64; 3], u32);

/// The features of a call without addresses: what changes the problem.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Features {
    /// Batch entries, the longest sequences, and which of the arrays exist.
    lengths: Option<(usize, [usize; 2], [bool; 5])>,
    sink: bool,
    score: String,
    mask: String,
    /// Bits of the float parameters.
    floats: Vec<u32>,
    ints: Vec<i32>,
    tables: Vec<Table>,
    scales: Scales,
}

impl Features {
    /// # Errors
    /// When a table's type is unknown.
    pub fn new(
        (lengths, sink, score, mask, floats, ints, tables, scales): &Described,
    ) -> Result<Features, Error> {
        let table = |(_, code, extents, strides): &DescribedTable| {
            let dtype = TYPES.get(usize::from(*code)).copied();
            let dtype = dtype.ok_or_else(|| {
                Error::invalid("the type of a table", &code.to_string(), "0 (f32) to 4 (u8)")
            })?;
            Ok(Table { dtype, extents: extents.clone(), strides: strides.clone() })
        };
        let lengths = lengths.as_ref().map(|&(batch, max_q, max_kv, arrays)| {
            // A problem has at least one row and one key, even if these are only upper bounds.
            (batch, [max_q.max(1), max_kv], arrays.map(|array| array.is_some()))
        });
        Ok(Features {
            lengths,
            sink: sink.is_some(),
            score: score.clone(),
            mask: mask.clone(),
            floats: floats.iter().map(|x| x.to_bits()).collect(),
            ints: ints.clone(),
            tables: tables.iter().map(table).collect::<Result<_, Error>>()?,
            scales: Scales { q: layout(&scales[0]), k: layout(&scales[1]), v: layout(&scales[2]) },
        })
    }

    /// States the features in a problem that was made from the shapes of tensors.
    ///
    /// # Errors
    /// When a text is not a valid program.
    pub fn apply(&self, problem: &mut Problem) -> Result<(), Error> {
        if let Some((batch, [max_q, max_kv], [packed_q, packed_kv, used_q, used_kv, left_padded])) =
            self.lengths
        {
            let q = SideLengths { packed: packed_q.then_some(problem.seq_q), used: used_q };
            let kv = SideLengths { packed: packed_kv.then_some(problem.seq_kv), used: used_kv };
            problem.lengths = Lengths { q, kv, left_padded };
            problem.batch = batch;
            problem.seq_q = if packed_q { max_q } else { problem.seq_q };
            problem.seq_kv = if packed_kv { max_kv } else { problem.seq_kv };
        }
        problem.score.sink = self.sink;
        problem.scales = self.scales;
        problem.programs = Programs {
            score: program(&self.score)?,
            mask: program(&self.mask)?,
            floats: self.floats.iter().map(|&bits| f32::from_bits(bits)).collect(),
            ints: self.ints.clone(),
            tables: self.tables.clone(),
        };
        Ok(())
    }

    /// Whether the queries, and whether the keys, of all batch entries follow each other in one tensor.
    pub fn packed(&self) -> [bool; 2] {
        self.lengths.map_or([false; 2], |(_, _, [q, kv, ..])| [q, kv])
    }
}

fn layout(described: &Option<DescribedScales>) -> Option<ScaleLayout> {
    let &(_, [batch, head, block], rows) = described.as_ref()?;
    Some(ScaleLayout { rows: (rows > 0).then_some(rows), batch, head, block })
}

/// The inputs beside Q, K and V, each with its address. The package describes them in the order of
/// [`Problem::operands`].
pub fn operands(
    (lengths, sink, _, _, _, _, tables, scales): &Described,
    problem: &Problem,
) -> Vec<(OperandSpec, usize)> {
    let arrays = lengths.map_or([None; 5], |(.., arrays)| arrays).into_iter().flatten();
    let tables = tables.iter().map(|&(address, ..)| address);
    let factors = scales.iter().flatten().map(|&(address, ..)| address);
    problem.other_inputs().zip(arrays.chain(*sink).chain(tables).chain(factors)).collect()
}

/// Largest number of cached programs. A full cache is emptied.
const MOST: usize = 1024;

/// The program of a text, which is parsed once. `None` for an empty text.
fn program(text: &str) -> Result<Option<Program>, Error> {
    static KNOWN: LazyLock<Mutex<HashMap<String, Arc<Program>>>> = LazyLock::new(Mutex::default);
    if text.is_empty() {
        return Ok(None);
    }
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = known.get(text) {
        return Ok(Some(Program::clone(program)));
    }
    let program: Program = text.parse().map_err(|error| Error::Argument(format!("{error}")))?;
    if known.len() >= MOST {
        known.clear();
    }
    known.insert(text.to_owned(), Arc::new(program.clone()));
    Ok(Some(program))
}
