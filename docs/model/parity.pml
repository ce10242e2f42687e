/* parity.pml - two data pieces and their parity: commits, applies, losses, reads, repairs, a move.
 *
 *   make model             the runs below, each exhaustive (docs/model/run.sh)
 *   tests/project/test_parity_model.py
 *                          those, and that spin finds each of the rules broken on purpose
 *
 * One group of a spread variable: pieces 0 and 1 have data, piece 2 (PARITY) is the XOR of both.
 * Each piece has one block and one home. There are NS servers: three, and one spare. There are NC
 * writers, each with one commit. The page server of the parity is killed between two steps of an
 * apply, or the registry in a repair or a move. A server is lost for good at any time. One member
 * moves.
 *
 * A commit writes one data piece or both. Its writer stages a layer for each, and for the parity a
 * delta: the XOR of (old XOR new) of what it writes. The homes pull these. Then the registry checks
 * conflicts on the data pieces, and writes one journal record: the row, with the version of each
 * piece, also of the parity. In the model a version has the number of the row that made it.
 *
 * The contents are bits, so that each XOR of them is another number. `truth` is what was committed.
 * Checked in every state:
 *   - A home says what was committed, at each row that it still has. So does the XOR of the other
 *     two members, at each row that both still have.
 *   - As long as one server is lost, each block of the newest row has an answer at any time.
 *   - A block is declared lost only when two servers have been lost. Nothing else is said of it
 *     then, until a commit has written it.
 *   - A commit is refused only when another one was first on a data piece.
 *   - What is decided is at the homes. The new home of a member has the newest version of it.
 *   - Two members are on one server only when there was no other server for one of them.
 *
 * Runs:
 *   (nothing)      one server is lost
 *   SECOND         two are; nothing is killed, and the history lets nothing go
 *   READ           a reader takes the other two members one after the other, while they change; one
 *                  server is lost, nothing moves, nothing is killed
 *   ENDS           each commit is decided or ends, each repair ends, and what was decided is
 *                  applied, in every run with one loss
 *   ENDS SECOND    the same with two
 *
 * Which source plays which part: pieces and their rows, commits (actors/commits), apply and history
 * (pagecache_c/engine/store), rebuilds (actors/lost_homes), moves (actors/moves).
 *
 * What is not here: how the home of a piece applies to an overlay, and who reads from where
 * (versions.pml); how a move is made and what may die in it (moves.pml: here it is one step); what
 * caches have of a lost piece; several blocks, so that pieces are of equal length; mirrors, which
 * are regions with the same writes.
 *
 * Rules, each with a switch that breaks it:
 *   BREAK_ROW          the row does not have the parity's version: the newest one is taken
 *   BREAK_RECORD       the parity is decided by a journal record of its own
 *   BREAK_CHECK        conflicts on data pieces are not checked
 *   BREAK_FALSE        conflicts are checked on the parity too
 *   BREAK_STAGE        the journal is written before the parity's home has the delta
 *   BREAK_RECHECK      a commit is decided though a member's home is not the one that pulled
 *   BREAK_WAIT         a commit does not wait for a member that has no home
 *   BREAK_TOLD         the parity's home applies a delta before the journal is written
 *   BREAK_ABORT        the delta of a commit that was refused is applied as the next one
 *   BREAK_TWICE        a delta is applied to what the block has, and not to what the history has
 *   BREAK_FIRST        a delta is written before the history has what it replaces
 *   BREAK_KEEP         the history lets go what a delta replaces before the delta is applied
 *   BREAK_PENDING      a delta that is not applied yet is read as content
 *   BREAK_CARRY        a home that moves gives a block with half of an apply
 *   BREAK_ONE_ROW      a repair takes members at the newest versions that they have
 *   BREAK_DEGRADED     a degraded read takes members at the newest versions that they have (READ)
 *   BREAK_SPARE        a repair goes to a server that has another member though another one is free
 *   BREAK_RESERVE      a server to which another member is on its way is taken
 *   BREAK_LAST         where each server has a member none is taken (ENDS SECOND finds it)
 *   BREAK_ZEROS        what is lost with a second member is taken for zeros (SECOND)
 *   BREAK_SPOIL        the parity is still used when a data block was declared lost (SECOND)
 *   BREAK_HEAL         a delta makes a parity whole that is lost (SECOND)
 *   BREAK_REMAKE       a parity that is lost is not made again when all data is whole (ENDS SECOND)
 */

#define NC 2              /* commits; rows and versions 0..NC */
#define NS 4              /* servers; the last one is the spare */
#define PARITY 2          /* the piece; 0 and 1 have data */
#define NONE 7            /* no piece, no server */

#define UNKNOWN 250       /* no home answers */
#define EXPIRED 251       /* the history does not have it any more */
#define LOST 252          /* declared lost */
#define is_content(x) ((x) < UNKNOWN)

#ifdef SECOND
#define LOSSES 2
#else
#define LOSSES 1
#endif

#define bit_of(i) (1 << (i))
#define FIRST(p) (16 << (p))               /* content of row 0 */
#define WRITTEN(c, p) (bit_of((c) - 1 + 2 * (p))) /* what commit c writes to data piece p */

/* ---- what should be */
byte truth[(NC + 1) * 2];
#define TRUTH(r, p) truth[(r) * 2 + (p)]
#define SHOULD(r, p) ((p) == PARITY -> TRUTH(r, 0) ^ TRUTH(r, 1) : TRUTH(r, p))

/* ---- registry: its journal */
byte newest;              /* row */
byte commit_at[NC + 1];   /* row -> commit */
byte home[3];             /* piece -> server; NONE: declared lost, and not made again yet */
byte lost_data;           /* bits: data pieces whose newest version is declared lost */
byte spoiled;             /* the parity says nothing of rows from spoiled - 1 on; 0: it says all */
#ifdef BREAK_RECORD
byte parity_rows = 1;     /* bits: rows whose record of the parity is written */
#define has_parity(r) (parity_rows & bit_of(r))
#else
#define has_parity(r) true
#endif
/* ---- registry: dies with it */
byte repaired = NONE;     /* the piece that is made again */
byte spare;               /* where */
byte row;                 /* at which its newest version is made */
byte at_row;              /* at which members are taken: that, then older ones for its history */
byte todo;                /* bits: members that are to be taken */
byte sum;                 /* XOR of those taken, or LOST */
byte moving = NONE;       /* piece */
byte taker;

/* ---- commits 1..NC */
mtype = { BEGUN, STAGED, DECIDED, REFUSED };
mtype state[NC + 1] = BEGUN;
byte base_of[NC + 1];     /* the row that it began at */
byte pieces_of[NC + 1];   /* bits: data pieces that it writes */
byte delta[NC + 1];
byte pulled[NC + 1];      /* bits: pieces whose home has said that it has the layer */

/* ---- the home of each piece, or what is made to be it: kept */
bit up[3];                /* it is a home and its server lives */
byte content[3];
byte applied[3];          /* version */
byte layers[3];           /* bits: commits whose layer is here, and not applied */
byte records[3];          /* bits: versions of which the history has the block */
byte history[3 * NC];
byte oldest[3];           /* version that can still be read */
#define HISTORY(p, v) history[(p) * NC + (v)]
/* ---- dies with the page server */
bit half;                 /* of the parity: the block is written, and the version not yet */

bit lost[NS];
byte losses;
bit killed, moved, trimmed;
bit doubled;              /* two members had to go to one server */

byte found, i, j, k;      /* scratch: 0 outside d_step */
#define forget_scratch() found = 0; i = 0; j = 0; k = 0

/* ------------------------------------------------------------------ versions */

#define writes(r, p) ((p) == PARITY -> has_parity(r) : (pieces_of[commit_at[r]] & bit_of(p)) != 0)
/* The version of a piece in a row. */
#define version_in(r, p) ((r) >= 2 && writes(2, p) -> 2 : ((r) >= 1 && writes(1, p) -> 1 : 0))
/* The version after the applied one, or 0. */
#define next_of(p) (applied[p] < 1 && newest >= 1 && writes(1, p) -> 1 : \
                    (applied[p] < 2 && newest >= 2 && writes(2, p) -> 2 : 0))
#define has_record(p, v) ((v) < NC && (records[p] & bit_of(v)))

/* The content of the applied version. */
#define whole(p) (has_record(p, applied[p]) -> HISTORY(p, applied[p]) : content[p])
#define xor(a, b) (is_content(a) && is_content(b) -> (a) ^ (b) : LOST)

/* What the home of piece p answers for row r, into `found`. */
inline ask(p, r)
{
#ifdef BREAK_ROW
    k = (p == PARITY -> version_in(newest, p) : version_in(r, p));
#else
    k = version_in(r, p);
#endif
    if
    :: !up[p] -> found = UNKNOWN
    :: up[p] && p == PARITY && spoiled && (r) + 1 >= spoiled -> found = LOST
    :: else ->
        if
        :: k < oldest[p] -> found = EXPIRED
        :: k >= oldest[p] && has_record(p, 0) && k == 0 -> found = HISTORY(p, 0)
        :: k >= oldest[p] && has_record(p, 1) && k <= 1 && !(has_record(p, 0) && k == 0) ->
            found = HISTORY(p, 1)
        :: k >= oldest[p] && !(has_record(p, 0) && k == 0) && !(has_record(p, 1) && k <= 1) ->
            if
            :: k <= applied[p] -> found = content[p]
            :: k > applied[p] && p != PARITY ->
                assert(layers[p] & bit_of(commit_at[k])); /* what is decided is there */
                found = WRITTEN(commit_at[k], p)
            :: k > applied[p] && p == PARITY ->
#ifdef BREAK_PENDING
                found = delta[commit_at[k]];
#else
                found = whole(p);
                i = applied[p] + 1;
                do
                :: i <= k ->
                    if
                    :: has_parity(i) ->
                        assert(layers[p] & bit_of(commit_at[i]));
                        found = xor(found, delta[commit_at[i]])
                    :: else
                    fi;
                    i++
                :: else -> break
                od;
                i = 0
#endif
            fi
        fi
    fi;
    k = 0
}

/* ----------------------------------------------------------------- placement */

#define others(p, s) (((p) != 0 && home[0] == (s)) || ((p) != 1 && home[1] == (s)) || \
                      ((p) != 2 && home[2] == (s)))
#ifdef BREAK_RESERVE
#define on_its_way(p, s) false
#else
#define on_its_way(p, s) ((moving != NONE && moving != (p) && taker == (s)) || \
                          (repaired != NONE && repaired != (p) && spare == (s)))
#endif
#define is_free(p, s) (!lost[s] && home[p] != (s) && !others(p, s) && !on_its_way(p, s))
#define some_free(p) (is_free(p, 0) || is_free(p, 1) || is_free(p, 2) || is_free(p, 3))

#ifdef BREAK_LAST
#define may_double false
#else
/* Each server has a member, and none is to become free: two on one are better than no home. */
#define may_double (moving == NONE)
#endif

/* The server for a piece, into `found`. */
inline place(p)
{
    doubled = doubled || !some_free(p);
    i = 0;
    found = NONE;
    do
    :: i < NS && found == NONE ->
        if
        :: some_free(p) && is_free(p, i) -> found = i
        :: !some_free(p) && !lost[i] -> found = i
        :: else
        fi;
        i++
    :: else -> break
    od;
    i = 0
}

inline clear(p)
{
    up[p] = 0; content[p] = 0; applied[p] = 0; layers[p] = 0; records[p] = 0; oldest[p] = 0;
    if
    :: p == PARITY ->
        half = 0;
        delta[1] = (state[1] == DECIDED -> 0 : delta[1]);
        delta[2] = (state[2] == DECIDED -> 0 : delta[2])
    :: else
    fi;
    HISTORY(p, 0) = 0; HISTORY(p, 1) = 0
}

/* ------------------------------------------------------------------- repairs */

inline rest()
{
    repaired = NONE; spare = 0; row = 0; at_row = 0; todo = 0; sum = 0
}

inline take_at(r)
{
    at_row = r; todo = 7 & ~bit_of(repaired); sum = 0
}

/* One member of the row. Whose home is lost, and not yet declared that, is waited for. */
#define can_take(m) (repaired != NONE && (todo & bit_of(m)) && (up[m] || home[m] == NONE))

inline take(m)
{
#ifdef BREAK_ONE_ROW
    j = (at_row == row -> newest : at_row);
    ask(m, j);
#else
    ask(m, at_row);
#endif
    todo = todo & ~bit_of(m);
    if
    :: found == EXPIRED && at_row == row -> clear(repaired); rest() /* again, at a newer row */
    :: found == EXPIRED && at_row != row -> todo = 0; sum = EXPIRED
    :: found == UNKNOWN || found == LOST ->
#ifndef BREAK_ZEROS
        sum = LOST
#endif
    :: is_content(found) -> sum = xor(sum, found)
    fi;
    forget_scratch()
}

#define NONE_LEFT 253     /* the older versions are made too, or cannot be */
#define is_made (repaired != NONE && !todo && sum != NONE_LEFT)

/* All members have been taken at `at_row`. */
inline made()
{
    j = repaired;
    k = version_in(at_row, j);
    if
    :: at_row == row -> content[j] = sum; applied[j] = k; oldest[j] = k; records[j] = 0
    :: at_row != row && is_content(sum) ->
        HISTORY(j, k) = sum; records[j] = records[j] | bit_of(k); oldest[j] = k
    :: else
    fi;
    if
    :: k == 0 || !is_content(sum) -> sum = NONE_LEFT
    :: else -> take_at(k - 1)
    fi;
    forget_scratch()
}

#ifdef BREAK_RECHECK
#define forgets_pulls(p) 0
#else
#define forgets_pulls(p) bit_of(p)
#endif

/* The home of the piece is another one from now on, which has no layer of what is not decided. */
inline no_pulls(p)
{
    i = 1;
    do
    :: i <= NC ->
        pulled[i] = (state[i] == STAGED -> pulled[i] & ~forgets_pulls(p) : pulled[i]);
        i++
    :: else -> break
    od;
    i = 0
}

/* The journal: it is the home. */
inline repair_ends()
{
    j = repaired;
    home[j] = spare;
    up[j] = 1;
    assert(applied[j] == version_in(newest, j));
    if
    :: content[j] == LOST && j != PARITY ->
        assert(losses == 2);
        lost_data = lost_data | bit_of(j);
#ifndef BREAK_SPOIL
        spoiled = (spoiled -> spoiled : newest + 1)
#endif
    :: content[j] == LOST && j == PARITY ->
        assert(losses == 2);
        spoiled = (spoiled -> spoiled : newest + 1)
    :: content[j] != LOST && j == PARITY -> spoiled = 0
    :: else
    fi;
    rest();
    forget_scratch()
}

proctype Repairs()
{
end:
    do
    :: d_step { can_take(0) -> take(0) }
    :: d_step { can_take(1) -> take(1) }
    :: d_step { can_take(2) -> take(2) }
    :: d_step { is_made -> made() }
    :: d_step { repaired != NONE && sum == NONE_LEFT -> repair_ends() }
#ifndef BREAK_REMAKE
    /* All data is whole again: the parity is made again as if its home was lost. */
    :: d_step { spoiled && !lost_data && home[0] != NONE && home[1] != NONE && up[PARITY] &&
                moving != PARITY ->
                clear(PARITY); home[PARITY] = NONE; no_pulls(PARITY) }
#endif
    /* A move ends: all that the giver has is of the version that it says. */
    :: d_step {
        moving != NONE && up[moving] && !lost[taker] ->
        j = moving;
        home[j] = taker;
        if
        :: has_record(j, applied[j]) ->
#ifndef BREAK_CARRY
            content[j] = HISTORY(j, applied[j]);
#endif
            HISTORY(j, applied[j]) = 0;
            records[j] = records[j] & ~bit_of(applied[j])
        :: else
        fi;
        half = (j == PARITY -> 0 : half);
        i = 1;
        do
        :: i <= NC -> layers[j] = (state[i] == DECIDED -> layers[j] : layers[j] & ~bit_of(i)); i++
        :: else -> break
        od;
        no_pulls(j);
        moving = NONE; taker = 0;
        forget_scratch()
       }
    :: d_step { moving != NONE && (!up[moving] || lost[taker]) -> moving = NONE; taker = 0 }
    od
}

/* -------------------------------------------------------------------- homes */

#define commit_of_next(p) commit_at[next_of(p)]

#ifdef BREAK_TWICE
#define old_block(p) content[p]
#else
#define old_block(p) whole(p)
#endif
#ifdef BREAK_KEEP
#define is_kept(p) true
#else
#define is_kept(p) has_record(p, applied[p])
#endif

#ifdef BREAK_FIRST
#define may_keep_old half
#define may_write(p) true
#else
#define may_keep_old !half
#define may_write(p) has_record(p, applied[p])
#endif

inline keep_old(p)
{
    HISTORY(p, applied[p]) = content[p];
    records[p] = records[p] | bit_of(applied[p])
}

inline drop(p, c)
{
    layers[p] = layers[p] & ~bit_of(c);
#ifdef BREAK_ABORT
    content[p] = xor(content[p], delta[c]);
#endif
    delta[c] = 0
}

inline is_at_next(p)
{
    layers[p] = layers[p] & ~bit_of(commit_of_next(p));
    delta[commit_of_next(p)] = (p == PARITY -> 0 : delta[commit_of_next(p)]);
    applied[p] = next_of(p)
}

proctype Member(byte p)
{
end:
    do
    /* the next layer: of data in one step; of the parity its old block, its block, its version */
    :: d_step { p != PARITY && up[p] && next_of(p) ->
                assert(layers[p] & bit_of(commit_of_next(p)));
                keep_old(p);
                content[p] = WRITTEN(commit_of_next(p), p);
                is_at_next(p) }
    :: d_step { p == PARITY && up[p] && next_of(p) && may_keep_old && !has_record(p, applied[p]) ->
                keep_old(p) }
    :: d_step { p == PARITY && up[p] && next_of(p) && !half && may_write(p) ->
                assert(layers[p] & bit_of(commit_of_next(p)));
                content[p] = xor(old_block(p), delta[commit_of_next(p)]);
                half = 1 }
    :: d_step { p == PARITY && up[p] && next_of(p) && half && is_kept(p) ->
                is_at_next(p);
                half = 0 }
#ifdef BREAK_TOLD
    :: d_step { p == PARITY && up[p] && applied[p] == newest &&
                state[1] == STAGED && (layers[p] & 2) ->
                HISTORY(p, newest) = content[p];
                records[p] = records[p] | bit_of(newest);
                content[p] = content[p] ^ delta[1];
                applied[p] = newest + 1;
                layers[p] = layers[p] & ~2 }
#endif
    /* a delta that was refused */
    :: d_step { p == PARITY && up[p] && state[1] == REFUSED && (layers[p] & 2) -> drop(p, 1) }
    :: d_step { p == PARITY && up[p] && state[2] == REFUSED && (layers[p] & 4) -> drop(p, 2) }
    /* the history lets the oldest go */
    :: d_step {
#ifdef BREAK_KEEP
        up[p] && !trimmed && records[p] ->
        oldest[p] = (has_record(p, applied[p]) -> applied[p] + 1 : applied[p]);
        records[p] = 0;
#else
        up[p] && !trimmed && (records[p] & ~bit_of(applied[p])) ->
        oldest[p] = applied[p];
        records[p] = records[p] & bit_of(applied[p]);
        HISTORY(p, 1) = (applied[p] == 1 -> HISTORY(p, 1) : 0);
#endif
        HISTORY(p, 0) = (has_record(p, 0) -> HISTORY(p, 0) : 0);
        trimmed = 1
       }
    /* its page server is killed, and started again */
    :: d_step { p == PARITY && !killed && half -> half = 0; killed = 1 }

    /* the registry: its home is declared lost, and it is made again elsewhere */
    :: d_step { home[p] != NONE && !up[p] -> home[p] = NONE; no_pulls(p) }
    :: d_step {
        home[p] == NONE && repaired == NONE && (some_free(p) || may_double) ->
        place(p);
#ifdef BREAK_SPARE
        found = (home[(p + 1) % 3] != NONE && up[(p + 1) % 3] -> home[(p + 1) % 3] : found);
#endif
        repaired = p; spare = found; row = newest; take_at(newest);
        forget_scratch()
       }
    /* the registry: it begins to move */
    :: d_step { !moved && up[p] && moving == NONE && some_free(p) ->
                place(p); moving = p; taker = found; moved = 1; forget_scratch() }
    od
}

/* ------------------------------------------------------------------- faults */

inline lose(s)
{
    lost[s] = 1;
    losses++;
    i = 0;
    do
    :: i < 3 ->
        if
        :: home[i] == s -> clear(i)
        :: else
        fi;
        i++
    :: else -> break
    od;
    if
    :: repaired != NONE && spare == s -> clear(repaired); rest()
    :: else
    fi;
    forget_scratch()
}

#define has_some(s) (home[0] == (s) || home[1] == (s) || home[2] == (s) || \
                     (moving != NONE && taker == (s)))

proctype Faults()
{
end:
    do
    :: d_step { losses < LOSSES && !lost[0] -> lose(0) }
    :: d_step { losses < LOSSES && !lost[1] -> lose(1) }
    :: d_step { losses < LOSSES && !lost[2] -> lose(2) }
    /* the spare: where one loss is all, it is lost only with something on it */
    :: d_step { losses < LOSSES && !lost[3] && (LOSSES == 2 || has_some(3)) -> lose(3) }
    /* the registry is killed, and started again */
    :: d_step {
        !killed && (repaired != NONE || moving != NONE) ->
        killed = 1;
        if
        :: repaired != NONE -> clear(repaired)
        :: else
        fi;
        rest(); moving = NONE; taker = 0
       }
    od
}

/* ------------------------------------------------------------------ writers */

#define needs(c) (pieces_of[c] | bit_of(PARITY))
#define was_first(c, p) (version_in(newest, p) > base_of[c])
#define conflict(c) (((pieces_of[c] & 1) && was_first(c, 0)) || \
                     ((pieces_of[c] & 2) && was_first(c, 1)))

#ifdef BREAK_WAIT
#define without_home ((home[0] == NONE -> 1 : 0) | (home[1] == NONE -> 2 : 0) | \
                      (home[2] == NONE -> 4 : 0))
#else
#define without_home 0
#endif
#ifdef BREAK_CHECK
#define is_refused(c) false
#else
#ifdef BREAK_FALSE
#define is_refused(c) (conflict(c) || was_first(c, PARITY))
#else
#define is_refused(c) conflict(c)
#endif
#endif
#ifdef BREAK_STAGE
#define are_pulled(c) (home[PARITY] != NONE && (pulled[c] & pieces_of[c]) == pieces_of[c])
#else
#define are_pulled(c) (((pulled[c] | without_home) & needs(c)) == needs(c))
#endif

inline old_and_new(c, p)
{
    if
    :: pieces_of[c] & bit_of(p) ->
        /* of a block that is lost nobody knows the old content: zeros */
        delta[c] = delta[c] ^ WRITTEN(c, p) ^ ((lost_data & bit_of(p)) -> 0 : TRUTH(newest, p))
    :: else
    fi
}

inline stage(c, pieces)
{
    pieces_of[c] = pieces;
    base_of[c] = newest;
    old_and_new(c, 0);
    old_and_new(c, 1);
    state[c] = STAGED
}

#define can_pull(c, p) (state[c] == STAGED && (needs(c) & bit_of(p)) && up[p] && \
                        !(pulled[c] & bit_of(p)))

inline pull(c, p)
{
    if
    :: can_pull(c, p) ->
        layers[p] = layers[p] | bit_of(c);
        pulled[c] = pulled[c] | bit_of(p)
    :: else
    fi
}

inline ends(c)
{
    pulled[c] = 0; base_of[c] = 0
}

/* The homes are told at once, but for that of the parity. */
inline refuse(c)
{
    state[c] = REFUSED;
    pieces_of[c] = 0;
    layers[0] = layers[0] & ~bit_of(c);
    layers[1] = layers[1] & ~bit_of(c);
    delta[c] = ((layers[PARITY] & bit_of(c)) -> delta[c] : 0);
    ends(c)
}

inline decide(c)
{
    newest++;
    commit_at[newest] = c;
    state[c] = DECIDED;
    TRUTH(newest, 0) = ((pieces_of[c] & 1) -> WRITTEN(c, 0) : TRUTH(newest - 1, 0));
    TRUTH(newest, 1) = ((pieces_of[c] & 2) -> WRITTEN(c, 1) : TRUTH(newest - 1, 1));
#ifdef BREAK_HEAL
    spoiled = 0;
#endif
    lost_data = lost_data & ~pieces_of[c];
    ends(c)
}

proctype Writer(byte c)
{
    if
#if defined(ENDS) || defined(READ) /* one case of the three, which may be a conflict */
    :: d_step { stage(c, 2 * c - 1) }
#else
    :: d_step { stage(c, 1) }
    :: d_step { c > 1 -> stage(c, 2) } /* of the first one: the data pieces are alike */
    :: d_step { stage(c, 3) }
#endif
    fi;
    do
    :: d_step { can_pull(c, 0) || can_pull(c, 1) -> pull(c, 0); pull(c, 1) }
    :: d_step { can_pull(c, PARITY) -> pull(c, PARITY) }
    :: d_step { is_refused(c) -> assert(conflict(c)); refuse(c) }; break
    :: d_step { !is_refused(c) && are_pulled(c) -> decide(c) };
#ifdef BREAK_RECORD
       d_step { parity_rows = parity_rows | bit_of(newest) };
#endif
       break
    /* the writer dies: its commit is never made. (Without a layer at the parity's home it is as if
     * it had not begun: plain layers are in versions.pml.) */
    :: d_step { state[c] == STAGED && (layers[PARITY] & bit_of(c)) -> refuse(c) }; break
    od
}

/* ------------------------------------------------------------------ readers */

#ifdef READ
/* A read of data piece p at row r from the other two members, one after the other. */
inline read_member(m)
{
#ifdef BREAK_DEGRADED
    ask(m, newest);
#else
    ask(m, at);
#endif
    got = (is_content(found) && is_content(got) -> got ^ found : UNKNOWN);
    forget_scratch()
}

proctype Reader()
{
    byte piece, first, at, got;

    atomic {
        if
        :: piece = 0; first = 1
        :: piece = 0; first = PARITY
        :: piece = 1; first = 0
        :: piece = 1; first = PARITY
        fi;
        if
        :: at = newest
        :: newest >= 1 -> at = newest - 1
        fi;
        d_step { read_member(first) }
    }
    d_step { read_member(3 - piece - first) };
    d_step { assert(got == UNKNOWN || got == TRUTH(at, piece));
             piece = 0; first = 0; at = 0; got = 0 }
}

#else
#ifndef ENDS
byte sum_of;

/* What is answered at this moment for piece p of row r: by its home, or by the others. */
inline check(q, r)
{
    ask(q, r);
    assert(!is_content(found) || found == SHOULD(r, q));
    assert(found != LOST || losses == 2);
    assert(found != EXPIRED || r < newest);
    j = found;
    ask((q + 1) % 3, r);
    sum_of = found;
    ask((q + 2) % 3, r);
    sum_of = (is_content(found) && is_content(sum_of) -> found ^ sum_of : UNKNOWN);
    assert(sum_of == UNKNOWN || sum_of == SHOULD(r, q));
    assert(losses == 2 || r < newest || is_content(j) || is_content(sum_of));
    sum_of = 0;
    forget_scratch()
}

proctype Monitor()
{
end:
    do
    :: d_step { check(0, newest); check(1, newest); check(2, newest) }
    :: d_step { newest >= 1 -> check(0, newest - 1); check(1, newest - 1); check(2, newest - 1) }
    :: d_step { newest >= 2 -> check(0, 0); check(1, 0); check(2, 0) }
    :: d_step { !doubled -> assert((home[0] == NONE || !others(0, home[0])) &&
                                   (home[1] == NONE || !others(1, home[1]))) }
    od
}
#else
#define is_done(c) (state[c] == DECIDED || state[c] == REFUSED)
#define is_applied(p) (up[p] && !layers[p]) /* what is decided has its layer there until then */
#define settled (is_done(1) && is_done(2) && repaired == NONE && moving == NONE && \
                 is_applied(0) && is_applied(1) && is_applied(2) && (!spoiled || lost_data))
ltl all_ends { <> [] settled }
#endif
#endif

init {
    atomic {
        TRUTH(0, 0) = FIRST(0); TRUTH(0, 1) = FIRST(1);
        content[0] = FIRST(0); content[1] = FIRST(1); content[2] = FIRST(0) ^ FIRST(1);
        home[0] = 0; home[1] = 1; home[2] = 2;
        up[0] = 1; up[1] = 1; up[2] = 1;
#ifdef SECOND
        killed = 1; trimmed = 1;
#endif
#ifdef READ
        killed = 1; moved = 1;
        run Reader();
#else
#ifndef ENDS
        run Monitor();
#endif
#endif
        run Faults(); run Repairs(); run Member(0); run Member(1); run Member(2);
        run Writer(1); run Writer(2)
    }
}
