/* versions.pml - versions of one region: commit, apply, advance, fork, evict, fetch, kill.
 *
 *   make model             the three runs below, each exhaustive (docs/model/run.sh)
 *   tests/project/test_model.py    those, and that spin finds each of the rules broken on purpose
 *
 * One region of NB blocks, its home, one other node that caches it, the registry with its journal,
 * and NC transactions: the first writes on the home's node, the others on the caching node. Readers
 * open any published version, again and again. A page server may be killed and started again between
 * any two steps, and so may the registry inside a commit call.
 *
 * The content of a block is the number of the commit that last wrote it (0: the put). `truth` is what
 * every version must look like; only the journal's write changes it. Checked in every state: whoever
 * holds version v sees v's content or stops at a hole; what the home answers for (block, v) is v's
 * content or "expired"; a published version's layers are all there; what a commit replaces is what its
 * writer read; what the writer is told is what the journal says.
 *
 * Three runs, because all of it at once has too many states:
 *   PART_HOME   registry, writers, home, a process that maps the home's base (no hole stops it), and
 *               in place of the caching node a process that asks for any block of any version
 *   PART_NODE   the caching node with two readers; in place of the home, its answers as PART_HOME
 *               proves them, and in place of the writers, versions that appear
 *   (neither)   both for real: one block, one reader, history without a budget (NO_EXPIRY)
 * In each of them every step is reached.
 *
 * Grace periods: a queued reply is of the current epoch or of the one before. The epoch turns when
 * nobody is left of the one before. What was retired in an epoch goes when that one is empty too:
 * `turned` counts the turns since. In PART_HOME there is, besides the fetch that is followed, a slow
 * reply: of any block, to anybody, it only stays. (It begins where that can make a difference: the
 * rest is states without end.)
 *
 * Which source plays which part:
 *   Writer       clamor_ray/_write/transaction.py, pagecache_c/client/stage.c; the registry's commit call:
 *                actors/commits/commits.py, commit_log.py (conflicts, outcomes) and journal.py
 *   Home         pagecache_c/engine/store/home.c (where a block of a version is), apply.c (the worker), layer.c,
 *                history.c, serve.c; actors/page_server/version_questions.py where it asks the registry
 *   Node         pagecache_c/engine/store/generation.c (advance, fork), fetch.c, fill.c; eviction is to come
 *   NodeReader   a process with a lease and what its OPEN does: pagecache_c/client/mapping/mapping.c, control_open.c,
 *   HomeReader   and attach.c, which attaches it to a restarted server
 *   Monitor      DESIGN 7, rules 1 and 2
 *
 * What outlives a page server is what the keeper holds: base, overlay, layers, history records and
 * generations, each with its label. The rest (queued replies, fetches in flight, who holds a lease,
 * which commits are known to be published, how far an apply or an advance got) dies with it.
 *
 * What is not here: several regions in one commit (one journal transaction covers them all); the trap
 * and its wake-ups (nothing here says that a reader gets its block in the end); eviction at the home;
 * the death of a node.
 *
 * Rules, each with a switch that breaks it:
 *   BREAK_ADVANCE      a generation advances while a block of its old version is in flight
 *   BREAK_RETAG        the generation gets its new label before its changed blocks are punched
 *   BREAK_SETTLE       a restarted server does not wait for those who held leases
 *   BREAK_SIBLING      a fork is filled from its sibling though the block differs between the two
 *   BREAK_APPLY_ORDER  blocks are punched before the history record of what they were
 *   BREAK_GRACE        blocks are punched while a reply that points at them is queued
 *   BREAK_TURN         a turn of the epoch that was begun for a layer serves the folded overlay too
 *   BREAK_TORN         an overlay that has a part of the next layer is folded
 *   BREAK_REAPPLY      a restarted home writes the history record again, from a half-applied base
 *   BREAK_LAYER_DROP   the layer goes before it is applied in full
 *   BREAK_PIN          the base changes under a process that maps it
 *   BREAK_MERGE        the overlay goes before all of it is in the base
 *   BREAK_PULL         a home answers for a version that it has not heard of, and does not ask
 *   BREAK_EXPIRED      a home whose history is gone answers with what it has
 *   BREAK_RECHECK      conflicts are not checked again after the wait for the home
 *   BREAK_COMMIT_ID    a commit that is asked for again is not recognised
 *   BREAK_OUTCOME      "what became of this commit?" does not stop it from committing later
 *   BREAK_STAGE        the journal is written before the home has the layer
 */

#ifndef NB
#define NB 2              /* blocks */
#endif
#ifndef NC
#define NC 2              /* commits; versions 0..NC */
#endif
#define NG 2              /* generations of the caching node */
#define NR 2              /* its readers */
#define ABSENT 14         /* a hole that is known to be one */
#define ZEROS 15          /* what a hole reads as where nothing stops the reader */

#define bit_of(i) (1 << (i))

/* ---- what should be */
byte truth[(NC + 1) * NB];
#define TRUTH(v, b) truth[(v) * NB + (b)]

/* ---- registry: its journal */
byte newest;              /* version */
byte commit_of[NC + 1];   /* version -> commit */
byte aborted;             /* commits that may never be published */

/* ---- commits 1..NC */
byte base_of[NC + 1];     /* the version it began at */
byte blocks_of[NC + 1];   /* bits: what it writes */

/* ---- home: kept */
byte base[NB];
bit overlay_is_there;
byte overlay[NB];         /* ABSENT: look in base */
byte applied;             /* version */
byte layers;              /* bits: commits whose layer is here */
byte records;             /* bits: versions with a history record */
byte history[NC * NB];    /* ABSENT: the record does not have the block */
bit base_is_half;         /* marked at the keeper before the first punch */
byte oldest;              /* version that can still be served */
/* ---- home: dies with it */
byte known;               /* the newest version that it has heard of */
mtype = { IDLE, GRACE, PUNCH, INSERT, LABEL, MERGE, UNLINK };
mtype at = IDLE;          /* the apply worker */
byte at_block;
bit to_overlay;
bit folded;               /* the overlay is in the base, and stays for queued replies */
bit torn;                 /* the overlay has, or may have, a part of the next layer */
bit base_taken;           /* the worker is at the base, or will be: nobody may map it */
byte layer_turned, fold_turned; /* turns since the blocks were replaced, the overlay folded */
bit slow, slow_is_old;    /* a reply that stays; it is of the epoch before */
bit fetch_is_old;
bit fetch_of_overlay;     /* where the queued reply points to; else into the base */
/* ---- home: the process that maps the base */
bit mapped, mapped_known; /* known: the server knows it (again) */
byte mapped_version;

/* ---- caching node: kept */
bit used[NG];
byte version[NG];
byte content[NG * NB];
byte node_layers;         /* bits: commits whose layer was staged here */
#define CONTENT(g, b) content[(g) * NB + (b)]
/* ---- caching node: dies with it */
byte advancing;           /* generation + 1; 0: none */
byte advance_to, advance_block;
mtype = { NOTHING, ASKED, QUEUED, ARRIVED, EXPIRED };
mtype fetch = NOTHING;
byte fetch_generation, fetch_block, fetch_version, fetch_content;
/* ---- caching node: its readers */
mtype = { CLOSED, OPENING, OPEN };
mtype reader[NR] = CLOSED;
byte wants[NR], lease[NR];
bit lease_known[NR];

/* ------------------------------------------------------------------ helpers */
#define half_applied (records & bit_of(applied))

#define has_overlay (overlay_is_there && !folded)
#define old_reader ((fetch == QUEUED && fetch_is_old) || (slow && slow_is_old))
#ifdef BREAK_GRACE
#define left(turned) true
#else
#define left(turned) ((turned) == 2 || ((turned) == 1 && !old_reader))
#endif
#ifdef BREAK_TORN
#define is_whole true
#else
#define is_whole (!torn)
#endif
#define may_turn(turned) ((turned) == 0 && !old_reader)

byte i, j, found;         /* scratch: 0 outside d_step */

/* Blocks that changed in (from, to], into `found`. */
inline changes(from, to)
{
    found = 0; i = 1;
    do
    :: i <= NC ->
        if
        :: i > from && i <= to -> found = found | blocks_of[commit_of[i]]
        :: else
        fi;
        i++
    :: else -> break
    od;
    i = 0
}

/* The version that a commit became, or 0, into `found`. */
inline version_of(c)
{
    found = 0; i = 1;
    do
    :: i <= newest -> if :: commit_of[i] == c -> found = i :: else fi; i++
    :: else -> break
    od;
    i = 0
}

/* Asks the registry what became of a commit that nobody says anything about. One that it does not
 * know never commits after this question, so the layer may go. */
inline ask_outcome(c, held)
{
    version_of(c);
    if
    :: found
    :: else ->
#ifndef BREAK_OUTCOME
        aborted = aborted | bit_of(c);
#endif
        held = held & ~bit_of(c)
    fi;
    forget_scratch()
}

inline forget_scratch() { i = 0; j = 0; found = 0 }

inline no_fetch()
{
    fetch = NOTHING; fetch_generation = 0; fetch_block = 0; fetch_version = 0; fetch_content = 0;
    fetch_is_old = 0; fetch_of_overlay = 0
}

#define CHECK_ANSWER assert(fetch_content == TRUTH(fetch_version, fetch_block))

/* ------------------------------------------------------------------ writers */

#ifdef PART_NODE
/* In place of writers, registry and home: what they are to the caching node. */
proctype Writer(byte c; bit remote)
{
    atomic {
        if
        :: blocks_of[c] = 1
        :: NB > 1 && c > 1 -> blocks_of[c] = 2 /* of the first one: the blocks are alike */
        :: NB > 1 -> blocks_of[c] = 3
        fi;
        i = 0;
        do
        :: i < NB ->
            TRUTH(newest + 1, i) = (blocks_of[c] & bit_of(i) -> c : TRUTH(newest, i));
            i++
        :: else -> break
        od;
        i = 0;
        newest++;
        commit_of[newest] = c
    }
}

proctype Home()
{
end:
    do
    :: d_step { fetch == ASKED -> fetch = ARRIVED;
                fetch_content = TRUTH(fetch_version, fetch_block) }
    :: d_step { fetch == ASKED && fetch_version < newest -> fetch = EXPIRED }
    od
}
#else

#define REFUSED 0
#define PUBLISHED 1
#define TRY 2

proctype Writer(byte c; bit remote)
{
    byte answer = TRY;

    atomic {
        base_of[c] = newest;
        if
        :: blocks_of[c] = 1
        :: NB > 1 && c > 1 -> blocks_of[c] = 2 /* of the first one: the blocks are alike */
        :: NB > 1 -> blocks_of[c] = 3
        fi
    }
    /* stage: with the page server of the writer's own node */
    if
    :: remote -> node_layers = node_layers | bit_of(c)
    :: !remote -> layers = layers | bit_of(c)
    :: goto died
    fi;
call:
    skip;
    /* the registry, on its own, up to where it waits for the home */
    d_step {
        version_of(c);
        if
#ifndef BREAK_COMMIT_ID
        :: found -> answer = PUBLISHED
#endif
        :: else ->
            changes(base_of[c], newest);
            if
            :: (aborted & bit_of(c)) || (found & blocks_of[c]) -> answer = REFUSED
            :: else -> answer = TRY
            fi
        fi;
        forget_scratch()
    }
    if
    :: answer != TRY -> goto answered
    :: else
    fi;
    if /* it waits until the home has pulled the layer */
#ifdef BREAK_STAGE
    :: true
#else
    :: remote && (node_layers & bit_of(c)) -> layers = layers | bit_of(c)
    :: remote && !(node_layers & bit_of(c)) -> answer = REFUSED; goto answered
    :: !remote
#endif
    :: goto call /* the registry was killed */
    fi;
    /* checks again, and writes the journal: no wait in between */
    d_step {
#ifdef BREAK_RECHECK
        found = (aborted & bit_of(c));
#else
        changes(base_of[c], newest);
        found = (found & blocks_of[c]) | (aborted & bit_of(c));
#endif
        if
        :: found -> answer = REFUSED
        :: else ->
            answer = PUBLISHED;
            i = 0;
            do
            :: i < NB ->
                /* no lost update: what it read is what it replaces */
                assert(!(blocks_of[c] & bit_of(i)) || TRUTH(base_of[c], i) == TRUTH(newest, i));
                if
                :: blocks_of[c] & bit_of(i) -> TRUTH(newest + 1, i) = c
                :: else -> TRUTH(newest + 1, i) = TRUTH(newest, i)
                fi;
                i++
            :: else -> break
            od;
            newest++;
            commit_of[newest] = c
        fi;
        forget_scratch()
    }
    if
    :: goto call /* the registry was killed before it answered */
    :: goto died
    :: true
    fi;
answered:
    skip;
    d_step { /* the answer is what the journal says; then resolve() */
        version_of(c);
        assert((answer == PUBLISHED) == (found != 0));
        node_layers = node_layers & ~bit_of(c);
        if
        :: answer == REFUSED && !remote -> layers = layers & ~bit_of(c)
        :: else
        fi;
        forget_scratch()
    }
died:
    skip;
    d_step { /* what can no longer matter is made equal, so that there are fewer states */
        version_of(c);
        base_of[c] = 0;
        if
        :: found
        :: else -> blocks_of[c] = 0; aborted = aborted | bit_of(c)
        fi;
        answer = 0;
        forget_scratch()
    }
}

/* --------------------------------------------------------------------- home */

/* Newest applied content, into `found`. */
inline current(b)
{
    if
    :: overlay[b] != ABSENT && !folded -> found = overlay[b]
    :: else -> found = base[b]
    fi
}

/* A new epoch: who is queued is of the one before. The rest waits for one turn less. */
inline turn()
{
    fetch_is_old = (fetch == QUEUED);
    slow_is_old = slow;
    layer_turned = ((half_applied || at == GRACE) && layer_turned < 2 -> layer_turned + 1 : layer_turned);
    fold_turned = (folded && fold_turned < 2 -> fold_turned + 1 : fold_turned)
}

/* Where block b of version v is: its content into `found`, or ABSENT: where current() says. */
inline look_up(b, v)
{
    found = ABSENT;
    i = v;
    do /* the first record from v on that has it */
    :: i < NC && found == ABSENT ->
        if
        :: records & bit_of(i) -> found = history[i * NB + b]
        :: else
        fi;
        i++
    :: else -> break
    od;
    if
    :: found == ABSENT && v > applied ->
        i = applied + 1;
        do /* the newest layer up to v that has it */
        :: i <= v && i <= known ->
            if
            :: blocks_of[commit_of[i]] & bit_of(b) ->
                assert(layers & bit_of(commit_of[i])); /* a published version is all there */
                found = commit_of[i]
            :: else
            fi;
            i++
        :: else -> break
        od
    :: else
    fi;
    i = 0
}

inline keep_record(v, blocks)
{
    i = 0;
    do
    :: i < NB ->
        if
        :: (blocks) & bit_of(i) ->
#ifdef BREAK_APPLY_ORDER
            found = TRUTH(v, i);
#else
            current(i);
#endif
            history[(v) * NB + i] = found
        :: else
        fi;
        i++
    :: else -> break
    od;
    records = records | bit_of(v)
}

inline home_hears_of_ask()
{
#ifndef BREAK_PULL
    if
    :: fetch_version > known -> known = newest
    :: else
    fi;
#endif
    if
#ifndef BREAK_EXPIRED
    :: fetch_version < oldest -> fetch = EXPIRED
#endif
    :: else ->
        look_up(fetch_block, fetch_version);
        if
        :: found == ABSENT ->
            fetch = QUEUED;
            fetch_is_old = 0;
            fetch_of_overlay = (overlay[fetch_block] != ABSENT && !folded)
        :: else -> fetch_content = found; fetch = ARRIVED
        fi
    fi;
    forget_scratch()
}

#define next_commit commit_of[applied + 1]
#define next_blocks blocks_of[next_commit]
#ifdef BREAK_SETTLE
#define home_settled true
#else
#define home_settled (!mapped || mapped_known)
#endif

proctype Home()
{
end:
    do
    /* the registry tells it, later */
    :: d_step { known < newest -> known++ }
    /* a layer that nobody says anything about: what became of it? */
    :: d_step { layers & bit_of(1) -> ask_outcome(1, layers) }
    :: d_step { layers & bit_of(2) -> ask_outcome(2, layers) }
#if NC > 2
    :: d_step { layers & bit_of(3) -> ask_outcome(3, layers) }
#endif

    /* apply: the history record, the grace period, punch and insert, the label */
    :: d_step {
        at == IDLE && home_settled && applied < known && !folded ->
        assert(layers & bit_of(next_commit));
        layer_turned = (half_applied -> layer_turned : 0); /* tried before, or by the last server */
#ifdef BREAK_REAPPLY
        keep_record(applied, next_blocks);
#else
#ifndef BREAK_APPLY_ORDER
        if
        :: half_applied
        :: else -> keep_record(applied, next_blocks)
        fi;
#endif
#endif
        base_taken = !(mapped_known || has_overlay);
#ifdef BREAK_LAYER_DROP
        layers = layers & ~bit_of(next_commit);
#endif
        at = GRACE;
        forget_scratch()
       }
    :: d_step { at == GRACE && may_turn(layer_turned) -> turn() }
    :: d_step { at == GRACE && !left(layer_turned) -> at = IDLE } /* busy: something else first */
    :: d_step {
        at == GRACE && left(layer_turned) ->
        layer_turned = 2;
#ifdef BREAK_PIN
        to_overlay = 0;
#else
        to_overlay = !base_taken;
#endif
        at_block = 0;
        at = PUNCH
       }
    :: d_step {
        at == PUNCH ->
        do
        :: at_block < NB && !(next_blocks & bit_of(at_block)) -> at_block++
        :: else -> break
        od;
        if
        :: at_block == NB -> at = LABEL; at_block = 0
        :: else ->
            if
            :: to_overlay -> overlay_is_there = 1; overlay[at_block] = ABSENT; torn = 1
            :: else -> base[at_block] = ZEROS; base_is_half = 1
            fi;
            at = INSERT
        fi
       }
    :: d_step {
        at == INSERT ->
        if
        :: to_overlay -> overlay[at_block] = next_commit
        :: else -> base[at_block] = next_commit
        fi;
        at_block++;
        at = PUNCH
       }
    :: d_step {
        at == LABEL ->
#ifdef BREAK_APPLY_ORDER
        keep_record(applied, next_blocks);
        forget_scratch();
#endif
        layers = layers & ~bit_of(next_commit);
        applied++;
        base_is_half = (to_overlay -> base_is_half : 0);
        torn = 0; to_overlay = 0; base_taken = 0; layer_turned = 0;
        at = IDLE
       }

    /* nobody maps the base any more: the overlay goes into it */
    :: d_step {
        at == IDLE && home_settled && has_overlay && !mapped_known && is_whole ->
        base_taken = 1; base_is_half = 1;
        at = MERGE
       }
    :: d_step {
        at == MERGE ->
        do
        :: at_block < NB && overlay[at_block] == ABSENT -> at_block++
        :: else -> break
        od;
        if
        :: at_block == NB -> at = UNLINK; at_block = 0
        :: else ->
            base[at_block] = overlay[at_block];
#ifdef BREAK_MERGE
            i = 0;
            do
            :: i < NB -> overlay[i] = ABSENT; i++
            :: else -> break
            od;
            i = 0;
#endif
            at_block++
        fi
       }
    :: d_step {
        at == UNLINK ->
        folded = 1;
#ifdef BREAK_TURN
        fold_turned = (half_applied -> layer_turned : 0);
#else
        fold_turned = 0;
#endif
        base_taken = 0; base_is_half = 0;
        at = IDLE
       }
    :: d_step { at == IDLE && folded && may_turn(fold_turned) -> turn() }
    :: d_step {
        at == IDLE && folded && left(fold_turned) ->
        i = 0;
        do
        :: i < NB -> overlay[i] = ABSENT; i++
        :: else -> break
        od;
        i = 0;
        overlay_is_there = 0; folded = 0; fold_turned = 0
       }
#ifdef PART_HOME

    /* replies to others */
    :: d_step { !slow && fetch == NOTHING && at == IDLE && !folded -> slow = 1; slow_is_old = 0 }
    :: d_step { slow -> slow = 0; slow_is_old = 0 }
#endif

    /* the budget of history */
#ifndef NO_EXPIRY
    :: d_step {
        oldest < applied ->
        records = records & ~bit_of(oldest);
        i = 0;
        do
        :: i < NB -> history[oldest * NB + i] = ABSENT; i++
        :: else -> break
        od;
        i = 0;
        oldest++
       }
#endif

    /* a block that the other node asks for: where it is now, and (later) the bytes */
    :: d_step {
        fetch == ASKED ->
        home_hears_of_ask()
       }
    :: d_step {
        fetch == QUEUED ->
        fetch_content = (fetch_of_overlay -> overlay[fetch_block] : base[fetch_block]);
        fetch = ARRIVED;
        fetch_is_old = 0; fetch_of_overlay = 0
       }

    /* killed, and started again */
    :: d_step {
        known = applied;
        at = IDLE; at_block = 0; to_overlay = 0;
        folded = 0; fold_turned = 0; layer_turned = 0; base_taken = 0;
        torn = half_applied && has_overlay;
        slow = 0; slow_is_old = 0; fetch_is_old = 0; fetch_of_overlay = 0;
        mapped_known = 0;
        if
#ifdef PART_HOME
        :: fetch != NOTHING -> no_fetch() /* who asked will ask again: any time */
#else
        :: fetch == QUEUED || fetch == ARRIVED -> fetch = ASKED; fetch_content = 0
#endif
        :: else
        fi
       }
    od
}

#endif /* PART_NODE */

#ifdef PART_HOME
/* A process of the home's node: it maps the base, where no hole stops it. */
proctype HomeReader()
{
end:
    do
    :: d_step {
        !mapped && !has_overlay && !base_taken && !base_is_half ->
        mapped = 1; mapped_known = 1; mapped_version = applied
       }
    :: d_step { mapped && !mapped_known -> mapped_known = 1 } /* attaches to the new server */
    :: d_step { mapped -> mapped = 0; mapped_known = 0; mapped_version = 0 }
    od
}

#endif

/* ------------------------------------------------------------- caching node */

#define leased_by(g, r) (reader[r] == OPEN && lease[r] == (g))
#ifdef BREAK_SETTLE
#define leased(g) ((leased_by(g, 0) && lease_known[0]) || (leased_by(g, 1) && lease_known[1]))
#define settled true
#else
#define leased(g) (leased_by(g, 0) || leased_by(g, 1))
#define settled ((reader[0] != OPEN || lease_known[0]) && (reader[1] != OPEN || lease_known[1]))
#endif
#ifdef BREAK_ADVANCE
#define in_flight(g) false
#else
#define in_flight(g) (fetch != NOTHING && fetch_generation == (g))
#endif
#define exact(g, v) (used[g] && version[g] == (v) && advancing != (g) + 1)
#define other(g) (1 - (g))
#define newer_than_other(g) (!used[other(g)] || version[g] > version[other(g)])

/* May it be moved to version v? */
#define moves(g, v) (used[g] && !leased(g) && !in_flight(g) && newer_than_other(g) && version[g] < (v))

inline drop_generation(g)
{
    if
    :: fetch != NOTHING && fetch_generation == g -> no_fetch() /* it goes into a file without a name */
    :: else
    fi;
    used[g] = 0; version[g] = 0;
    i = 0;
    do
    :: i < NB -> CONTENT(g, i) = ABSENT; i++
    :: else -> break
    od;
    i = 0
}

#define can_ask(r, b) \
    (fetch == NOTHING && reader[r] == OPEN && lease_known[r] && CONTENT(lease[r], b) == ABSENT)
inline ask_home(g, b)
{
    fetch = ASKED; fetch_generation = g; fetch_block = b; fetch_version = version[g]
}

/* Blocks that are the same in both. */
inline fill_from(sibling, g)
{
    if
    :: version[g] < version[sibling] -> changes(version[g], version[sibling])
    :: else -> changes(version[sibling], version[g])
    fi;
#ifdef BREAK_SIBLING
    found = 0;
#endif
    i = 0;
    do
    :: i < NB ->
        if
        :: !(found & bit_of(i)) && CONTENT(g, i) == ABSENT -> CONTENT(g, i) = CONTENT(sibling, i)
        :: else
        fi;
        i++
    :: else -> break
    od;
    forget_scratch()
}

#ifndef PART_HOME
proctype NodeReader(byte r)
{
end:
    do
    :: atomic { /* any version there is; that one, or whatever is newest */
        reader[r] == CLOSED ->
        if
        :: wants[r] = newest
        :: newest > 0 -> wants[r] = newest - 1
        :: newest > 1 -> wants[r] = newest - 2
        fi;
        reader[r] = OPENING
       }
    :: d_step { /* exact version */
        reader[r] == OPENING && (exact(0, wants[r]) || exact(1, wants[r])) ->
        lease[r] = (exact(0, wants[r]) -> 0 : 1);
        lease_known[r] = 1;
        reader[r] = OPEN
       }
    :: d_step { reader[r] == OPEN && !lease_known[r] -> lease_known[r] = 1 } /* attaches again */
    :: d_step { /* the fork goes with its last lease; the newest generation stays as a cache */
        reader[r] == OPEN && lease_known[r] ->
        reader[r] = CLOSED; lease_known[r] = 0; wants[r] = 0;
        j = lease[r];
        lease[r] = 0;
        if
        :: !leased(j) && !newer_than_other(j) && advancing != j + 1 -> drop_generation(j)
        :: else
        fi;
        forget_scratch()
       }
    /* what the node must do first, for this open */
    :: d_step {
        reader[r] == OPENING && advancing == 0 && settled &&
        !exact(0, wants[r]) && !exact(1, wants[r]) ->
        if
        :: moves(0, wants[r]) ->
            advancing = 1; advance_to = wants[r]
        :: else ->
            if
            :: moves(1, wants[r]) ->
                advancing = 2; advance_to = wants[r]
            :: else -> /* fork; where there is no room, in place of one without leases */
                j = (!used[0] -> 0 : (!used[1] -> 1 : (!leased(0) -> 0 : 1)));
                if
                :: leased(j)
                :: else -> drop_generation(j); used[j] = 1; version[j] = wants[r]
                fi
            fi
        fi;
        forget_scratch()
       }
    od
}

#endif /* PART_HOME */

#ifdef PART_HOME
inline ask(b, v)
{
    fetch_block = b;
    fetch_version = v;
    home_hears_of_ask();
    if
    :: fetch == ARRIVED -> CHECK_ANSWER; no_fetch()
    :: fetch == EXPIRED -> no_fetch()
    :: else
    fi
}

/* In place of the caching node: it asks for any block of any version, again and again. */
proctype Node()
{
end:
    do
    :: d_step { fetch == NOTHING -> ask(0, newest) }
    :: d_step { fetch == NOTHING -> ask(NB - 1, newest) }
    :: d_step { fetch == NOTHING && newest > 0 -> ask(0, newest - 1) }
    :: d_step { fetch == NOTHING && newest > 0 -> ask(NB - 1, newest - 1) }
    :: d_step { fetch == NOTHING && newest > 1 -> ask(0, newest - 2) }
    :: d_step { fetch == NOTHING && newest > 1 -> ask(NB - 1, newest - 2) }
    :: d_step { fetch == ARRIVED -> CHECK_ANSWER; no_fetch() }
    :: d_step { node_layers & bit_of(1) -> ask_outcome(1, node_layers) }
    :: d_step { node_layers & bit_of(2) -> ask_outcome(2, node_layers) }
#if NC > 2
    :: d_step { node_layers & bit_of(3) -> ask_outcome(3, node_layers) }
#endif
    od
}
#else
proctype Node()
{
end:
    do
    /* advance in place: punch what changed, then the label */
    :: d_step {
        advancing != 0 ->
        j = advancing - 1;
#ifdef BREAK_RETAG
        if
        :: advance_block == 0 -> changes(version[j], advance_to); advance_block = 1 + found;
                                 version[j] = advance_to
        :: advance_block == 1 -> advancing = 0; advance_to = 0; advance_block = 0
        :: else ->
            i = 0;
            do
            :: i < NB && !((advance_block - 1) & bit_of(i)) -> i++
            :: else -> break
            od;
            CONTENT(j, i) = ABSENT;
            advance_block = 1 + ((advance_block - 1) & ~bit_of(i))
        fi;
#else
        if
        :: advance_block < NB ->
            changes(version[j], advance_to);
            if
            :: found & bit_of(advance_block) -> CONTENT(j, advance_block) = ABSENT
            :: else
            fi;
            advance_block++
        :: else -> version[j] = advance_to; advancing = 0; advance_to = 0; advance_block = 0
        fi;
#endif
        forget_scratch()
       }

    /* a reader stands at an absent block: from the sibling, or from the home */
    :: d_step { can_ask(0, 0) -> ask_home(lease[0], 0) }
    :: d_step { can_ask(0, NB - 1) -> ask_home(lease[0], NB - 1) }
    :: d_step { can_ask(1, 0) -> ask_home(lease[1], 0) }
    :: d_step { can_ask(1, NB - 1) -> ask_home(lease[1], NB - 1) }
    :: d_step { used[0] && used[1] && advancing == 0 && leased(0) -> fill_from(1, 0) }
    :: d_step { used[0] && used[1] && advancing == 0 && leased(1) -> fill_from(0, 1) }
    :: d_step {
        fetch == ARRIVED ->
        CHECK_ANSWER;
        j = fetch_generation;
        if
        :: CONTENT(j, fetch_block) == ABSENT -> CONTENT(j, fetch_block) = fetch_content
        :: else
        fi;
        no_fetch();
        forget_scratch()
       }
    :: d_step { /* SnapshotExpired, to all who hold that version */
        fetch == EXPIRED ->
        j = 0;
        do
        :: j < NR ->
            if
            :: reader[j] == OPEN && wants[j] == fetch_version ->
                reader[j] = CLOSED; lease_known[j] = 0; wants[j] = 0; lease[j] = 0
            :: else
            fi;
            j++
        :: else -> break
        od;
        no_fetch();
        forget_scratch()
       }

    /* evict */
    :: CONTENT(0, 0) != ABSENT -> CONTENT(0, 0) = ABSENT
    :: CONTENT(0, NB - 1) != ABSENT -> CONTENT(0, NB - 1) = ABSENT
    :: CONTENT(1, 0) != ABSENT -> CONTENT(1, 0) = ABSENT
    :: CONTENT(1, NB - 1) != ABSENT -> CONTENT(1, NB - 1) = ABSENT

    /* a layer whose writer is gone */
    :: d_step { node_layers & bit_of(1) -> ask_outcome(1, node_layers) }
    :: d_step { node_layers & bit_of(2) -> ask_outcome(2, node_layers) }
#if NC > 2
    :: d_step { node_layers & bit_of(3) -> ask_outcome(3, node_layers) }
#endif

    /* killed, and started again */
    :: d_step {
        no_fetch();
        advancing = 0; advance_to = 0; advance_block = 0;
        lease_known[0] = 0; lease_known[1] = 0
       }
    od
}

#endif /* PART_HOME */

/* ------------------------------------------------------------------ monitor */

#define sees(r) (reader[r] == OPEN)

proctype Monitor()
{
end:
    do
    :: d_step {
        i = 0;
        do
        :: i < NB ->
            /* who holds v sees v's content, and stops at a hole */
            assert(!mapped || base[i] == TRUTH(mapped_version, i));
            assert(!sees(0) || CONTENT(lease[0], i) == ABSENT ||
                   CONTENT(lease[0], i) == TRUTH(wants[0], i));
            assert(!sees(1) || CONTENT(lease[1], i) == ABSENT ||
                   CONTENT(lease[1], i) == TRUTH(wants[1], i));
            i++
        :: else -> break
        od;
        i = 0
       }
    od
}

init {
    atomic {
        i = 0;
        do
        :: i < NB ->
            overlay[i] = ABSENT;
            CONTENT(0, i) = ABSENT; CONTENT(1, i) = ABSENT;
            j = 0;
            do
            :: j < NC -> history[j * NB + i] = ABSENT; j++
            :: else -> break
            od;
            i++
        :: else -> break
        od;
        forget_scratch();
        run Monitor(); run Home(); run Node();
#ifdef PART_HOME
        run HomeReader();
#else
        run NodeReader(0);
#endif
#ifdef PART_NODE
        run NodeReader(1);
#endif
        run Writer(1, 0); run Writer(2, 1);
#if NC > 2
        run Writer(3, 1);
#endif
    }
}
