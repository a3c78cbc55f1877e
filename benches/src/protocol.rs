//! What is measured and how: shapes, rows of a call, copies of weights, calls of a graph. `benches/peers/plan.py` has the same
//! for other libraries.

/// N and K of the vocabulary head of the 27B host. A prompt never passes it, only its last row does.
pub const HEAD: (usize, usize) = (248_320, 5120);
/// N and K of that host's projections.
pub const SHAPES: [(usize, usize); 6] =
    [(17408, 5120), (5120, 17408), (12288, 5120), (5120, 6144), (1024, 5120), HEAD];

/// Rows of a call (M).
pub const ROWS: [usize; 6] = [1, 2, 4, 8, 16, 2048];
/// Up to here a call waits for its weights; of more rows, it waits for the arithmetic.
pub const DECODE_ROWS: usize = 16;

/// Rows of a call that are also measured without overlap of one kernel with the next.
pub const WITHOUT_OVERLAP: [usize; 2] = [1, DECODE_ROWS];

/// Bytes that rotating copies add up to at least, several times any L2.
pub const ROTATE_BYTES: usize = 400_000_000;
/// Decode calls of one graph, at least: enough that the graph's own launch does not show.
pub const CALLS: usize = 64;
/// Replays of a graph, of which the median counts.
pub const REPLAYS: usize = 20;

/// The row counts that are measured at a shape.
pub fn rows(n: usize, k: usize) -> impl Iterator<Item = usize> {
    ROWS.into_iter().filter(move |&m| m <= DECODE_ROWS || (n, k) != HEAD)
}

/// How many copies of `bytes` each keep a rotation out of L2.
pub fn copies(bytes: usize) -> usize {
    ROTATE_BYTES.div_ceil(bytes.max(1)).max(2)
}

/// Calls of one graph: whole rotations, so that every copy is read equally often. Calls of a prompt's rows are long enough for
/// one rotation to do.
pub fn calls(copies: usize, m: usize) -> usize {
    if m <= DECODE_ROWS { CALLS.div_ceil(copies) * copies } else { copies }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use serde::Deserialize;

    use super::*;

    fn python(args: &[&str]) -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let output = Command::new("python3").arg("-B").args(args).current_dir(folder).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "python3 {}: {said}", args.join(" "));
        String::from_utf8(output.stdout).unwrap()
    }

    #[derive(Deserialize)]
    struct Plan {
        rotate_bytes: usize,
        replays: usize,
        rows: Vec<Planned>,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    struct Planned {
        n: usize,
        k: usize,
        m: usize,
        copies: usize,
        calls: usize,
    }

    /// Peers are measured on the same shapes by the same protocol. BF16 weights take 2 N K bytes on both sides.
    #[test]
    fn peers_have_the_same_plan() {
        let plan: Plan = serde_json::from_str(&python(&["peers.py", "--plan", "--format", "bf16"])).unwrap();
        assert_eq!((plan.rotate_bytes, plan.replays), (ROTATE_BYTES, REPLAYS));
        let mut ours = Vec::new();
        for (n, k) in SHAPES {
            let copies = copies(2 * n * k);
            ours.extend(rows(n, k).map(|m| Planned { n, k, m, copies, calls: calls(copies, m) }));
        }
        assert_eq!(plan.rows, ours);
    }

    #[test]
    fn peers_pass_their_own_tests() {
        python(&["-m", "unittest", "--quiet"]);
    }
}
