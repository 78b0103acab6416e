/* A process that waits lets others run: preloaded into the learners of the tests.

   Open MPI waits in a loop around sched_yield(), which hands the core on for a moment only. Where more learners
   than cores wait for each other, as in most tests, these loops take most of the cores. */

#include <time.h>

int sched_yield(void) {
  struct timespec moment = {0, 20000};
  nanosleep(&moment, 0);
  return 0;
}
